"""o_i = sum_j p_ij v_j,  p_ij = exp(s_ij - L_i),  s_ij = scale q_i k_j,  L_i = log sum_j exp s_ij.

Scaled dot-product attention in tiles (Dao, FlashAttention-2, 2023): a tile of queries, all heads of
a kv group together, meets the keys up to its last position, so the full matrix of scores never
exists.  Backward computes p again from the log-sum-exp L:

    D_i = do_i . o_i - dL_i        dv_j = sum_i p_ij do_i          ds_ij = p_ij (do_i . v_j - D_i)
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i

Shapes: q (B, S, H, D), k and v (B, K, G, D) with H a multiple of G: query head h uses kv head
h // (H/G) (Ainslie et al., GQA, 2023).  Query i stands at position q_offset + i, key j at k_offset
+ j; causal: a query sees the keys at positions up to its own.  A query that sees none gets o = 0
and L = -inf.

L is float64: at scores of 1e4 a float32 L would cost p three digits.  Backward splits it into a
float32 part, subtracted from the scores, and the rest, which goes into the rows of do.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels import masked_exp
from mpipar.kernels.blocks import host, row_max
from mpipar.kernels.native import usable

TILE = 64  # queries; twice as many for long rows of keys, whose edge is a smaller share
LONG = 512  # keys
SCORES = 1 << 17  # elements of a tile's scores, all of its heads: 512 KiB in float32
Pump = Callable[[], None]
BOUND = 30.0  # e^30, and sums of it, are far from the limits of float32
SMALL, LARGE = math.exp(-BOUND), math.exp(BOUND)

Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]  # of q, k and v


class Mask(NamedTuple):
    """Which keys a query sees: those up to its own position, if causal; and the score's scale."""

    causal: bool = True
    scale: float = 1.0
    q_offset: int = 0
    k_offset: int = 0


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """Return o (B, S, H, D) and L (B, H, S) in float64, through the full matrix of scores."""
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * mask.scale
    if mask.causal:
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        s = np.where(mask.k_offset + j <= mask.q_offset + i, s, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), -1e300)
    p = np.exp(s - top)
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top[..., 0]
    p /= np.where(total == 0, 1, total)[..., None]
    return np.einsum("bhij,bjhd->bihd", p, v), np.where(total == 0, -np.inf, lse)


class _Tile(NamedTuple):
    """Queries `rows`, and the number of keys that the last and the first of them see."""

    rows: slice
    seen: int
    by_all: int


def _tile_size(queries: int, keys: int) -> int:
    """Return the number of queries of a tile."""
    return max(1, min(TILE if keys <= LONG else 2 * TILE, queries))


def _tiles(queries: int, keys: int, mask: Mask) -> Iterator[_Tile]:
    """Yield the tiles of the queries."""
    size = _tile_size(queries, keys)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        if mask.causal:
            ahead = mask.q_offset - mask.k_offset
            last, first = (min(max(ahead + i, 0), keys) for i in (stop, start + 1))
            yield _Tile(slice(start, stop), last, first)
        else:
            yield _Tile(slice(start, stop), keys, keys)


def _groups(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield batch index and kv heads, as many as keep a tile's scores in the cache."""
    repeat = q.shape[2] // k.shape[2]
    one = repeat * _tile_size(q.shape[1], k.shape[1]) * k.shape[1]
    step = max(1, SCORES // max(one, 1))
    for b in range(q.shape[0]):
        for g in range(0, k.shape[2], step):
            yield b, slice(g, min(g + step, k.shape[2]))


def _space(q: np.ndarray, k: np.ndarray) -> int:
    """Return the elements of the largest tile's scores."""
    heads = max((s.stop - s.start for _, s in _groups(q, k)), default=0)
    return heads * (q.shape[2] // k.shape[2]) * _tile_size(q.shape[1], k.shape[1]) * k.shape[1]


def _rows_of(x: np.ndarray, b: int, heads: slice, groups: int) -> np.ndarray:
    """Return the query rows x (B, S, H, D) of a batch index and kv heads as a view (G, R, S, D)."""
    _, seq, count, width = x.shape
    by_group = x[b].reshape(seq, groups, count // groups, width)
    return by_group[:, heads].transpose(1, 2, 0, 3)


def _tile_rows(rows: np.ndarray, tile: _Tile, wide: np.dtype) -> np.ndarray:
    """Return the tile's rows (G, R * T, D): a view if R is 1 and nothing is widened."""
    part = rows[:, :, tile.rows]
    return part.reshape(part.shape[0], -1, part.shape[3]).astype(wide, copy=False)


def _product_into(target: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Write x @ y (G, R * T, D) into the view target (G, R, T, D)."""
    if target.shape[1] == 1 and target.dtype == x.dtype:
        np.matmul(x, y, out=target[:, 0])
    else:
        target[...] = (x @ y).reshape(target.shape)


def _across(x: np.ndarray, extra: int = 0) -> np.ndarray:
    """Return x (G, K, D) as a contiguous (G, D + extra, K), with rows of ones as the extra."""
    g, k, d = x.shape
    out = np.ones((g, d + extra, k), x.dtype)
    for start in range(0, k, 64):  # chunks of columns stay in the cache
        out[:, :d, start : start + 64] = x[:, start : start + 64].transpose(0, 2, 1)
    return out


class _Keys:
    """Keys (times the scale) and values of a batch index and some heads, to suit the products."""

    def __init__(self, k: np.ndarray, v: np.ndarray, b: int, some: slice, mask: Mask) -> None:
        self.mask = mask
        wide = compute_dtype(k.dtype)
        self.keys = np.empty((some.stop - some.start, k.shape[1], k.shape[3]), wide)  # (G, K, D)
        np.multiply(k[b, :, some].transpose(1, 0, 2), mask.scale, out=self.keys, dtype=wide)
        self.values = np.ascontiguousarray(v[b, :, some].transpose(1, 0, 2), wide)
        self.across = _across(self.keys)

    def product(self, q: np.ndarray, tile: _Tile, space: np.ndarray) -> np.ndarray:
        """Return the scores (G, R * T, seen) of queries q (G, R * T, D), none of them masked."""
        shape = (q.shape[0], q.shape[1], tile.seen)
        s = space[: math.prod(shape)].reshape(shape)
        return np.matmul(q, self.across[:, :, : tile.seen], out=s)

    def scores(self, q: np.ndarray, tile: _Tile, space: np.ndarray) -> np.ndarray:
        """Return the masked scores (G, R * T, seen) of queries q (G, R * T, D)."""
        s = self.product(q, tile, space)
        if tile.by_all < tile.seen:
            rows, _, ahead = self.edge(tile)
            edge = s.reshape(s.shape[0], -1, rows, tile.seen)[..., tile.by_all :]
            np.copyto(edge, -np.inf, where=_hidden(rows, tile.seen - tile.by_all, ahead))
        return s

    def edge(self, tile: _Tile) -> tuple[int, int, int]:
        """Return the tile's queries T, its `by_all`, and `ahead`: query i sees ahead + i + 1 more.

        (Where all keys are seen by all, more than there are.)
        """
        rows = tile.rows.stop - tile.rows.start
        ahead = self.mask.q_offset + tile.rows.start - self.mask.k_offset - tile.by_all
        return rows, tile.by_all, ahead


@functools.lru_cache(maxsize=64)
def _hidden(rows: int, columns: int, ahead: int) -> np.ndarray:
    """Return where column j > ahead + row i: (rows, columns)."""
    return np.arange(columns) > ahead + np.arange(rows)[:, None]


def forward_cpu(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask, pump: Pump
) -> tuple[np.ndarray, np.ndarray]:
    """Return o and L, tile by tile.

    Exponentials of the scores are taken as they are; only where their sums come near the limits of
    float32, the tile's are taken again with the maximum of each row subtracted.
    """
    batch, seq, heads, _ = q.shape
    groups = k.shape[2]
    wide = compute_dtype(q.dtype)
    out = np.empty((batch, seq, heads, v.shape[3]), q.dtype)
    totals = np.empty((batch, groups, heads // groups, seq, 1), wide)
    tops = np.zeros_like(totals)
    space = np.empty(_space(q, k), wide)
    loops = usable(space)
    for b, some in _groups(q, k):
        queries, results = (_rows_of(x, b, some, groups) for x in (q, out))
        keys = _Keys(k, v, b, some, mask)
        for tile in _tiles(seq, k.shape[1], mask):
            pump()
            target, total = results[:, :, tile.rows], totals[b, some, :, tile.rows]
            if not tile.seen:
                target[...], total[...] = 0, 0
                continue
            rows, ones = _tile_rows(queries, tile, wide), np.ones((tile.seen, 1), wide)
            if loops:
                s = keys.product(rows, tile, space)
                sums = np.empty(total.shape, wide)
                masked_exp.forward_loop(s, sums, sums.size, tile.seen, *keys.edge(tile))
                total[...] = sums
            else:
                s = keys.scores(rows, tile, space)
                with np.errstate(over="ignore"):
                    _product_into(total, np.exp(s, out=s), ones)
            if not (total.min() >= SMALL and total.max() <= LARGE):
                s = keys.scores(rows, tile, space)
                tops[b, some, :, tile.rows] = _subtract_top(s).reshape(total.shape)
                _product_into(total, np.exp(s, out=s), ones)
            o = (s @ keys.values[:, : tile.seen]).reshape(target.shape)
            divisor = total if tile.by_all else np.where(total == 0, 1, total)
            np.divide(o, divisor, out=target, casting="same_kind")
    with np.errstate(divide="ignore"):
        lse = np.log(totals, dtype=np.float64) + tops  # -inf where no key is seen
    return out, lse.reshape(batch, heads, seq)


def _subtract_top(s: np.ndarray) -> np.ndarray:
    """Subtract from each row of s its maximum (0 if all is hidden), and return it."""
    top = row_max(s)
    top[np.isneginf(top)] = 0
    s -= top
    return top


def backward_cpu(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask, pump: Pump,
    out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of q, k and v, tile by tile; lse and delta (B, H, S) are float64."""
    groups = k.shape[2]
    wide = compute_dtype(q.dtype)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v)) if out is None else out
    space = np.empty((2, _space(q, k)), wide)
    loops = usable(space)
    per_row = (q.shape[0], groups, q.shape[2] // groups, q.shape[1], 1)
    head, rest = _split(lse.reshape(per_row), wide)
    shift = np.multiply(delta.reshape(per_row), -rest)
    for b, some in _groups(q, k):
        queries, grads, results = (_rows_of(x, b, some, groups) for x in (q, do, dq))
        grads = _gradient_rows(grads, shift[b, some], rest[b, some])
        keys = _Keys(k, v, b, some, mask)
        values = _across(keys.values, extra=1)
        sums = np.empty_like(keys.keys), np.empty_like(keys.values)  # dk and dv (G, K, D)
        done = 0  # keys whose sums have begun
        for tile in reversed(list(_tiles(q.shape[1], k.shape[1], mask))):
            pump()
            target = results[:, :, tile.rows]
            if not tile.seen:
                target[...] = 0
                continue
            rows, g = (_tile_rows(x, tile, wide) for x in (queries, grads))
            tops = None if head is None else head[b, some, :, tile.rows]
            p = (keys.product if loops else keys.scores)(rows, tile, space[0])
            ds = space[1, : p.size].reshape(p.shape)
            np.matmul(g, values[:, :, : tile.seen], out=ds)
            if loops:
                top = np.zeros(p.shape[:2], wide) if tops is None else np.ascontiguousarray(tops)
                masked_exp.backward_loop(p, ds, top, top.size, tile.seen, *keys.edge(tile))
            else:
                p = p if tops is None else np.subtract(p, tops.reshape(*p.shape[:2], 1), out=p)
                ds *= np.exp(p, out=p)
            _add_product(sums[1], p, g[..., :-1], done)
            _add_product(sums[0], ds, rows, done)
            done = max(done, tile.seen)
            _product_into(target, ds, keys.keys[:, : tile.seen])
        for total, scale, grad in ((sums[0], mask.scale, dk), (sums[1], 1, dv)):
            total[:, done:] = 0
            by_key = total.transpose(1, 0, 2)
            np.multiply(by_key, scale, out=grad[b, :, some], casting="same_kind")
    return dq, dk, dv


def _add_product(total: np.ndarray, p: np.ndarray, x: np.ndarray, done: int) -> None:
    """Add p^T x, p (G, R * T, seen), to the rows of total (G, K, D) of the keys seen.

    Tiles come from the last to the first, which sees the fewest keys; so the first of them writes,
    where nothing is `done`, and the others add.
    """
    across = p.transpose(0, 2, 1)
    if not done:
        np.matmul(across, x, out=total[:, : p.shape[2]])
    else:
        total[:, : p.shape[2]] += across @ x


def _split(lse: np.ndarray, wide: np.dtype) -> tuple[np.ndarray | None, np.ndarray]:
    """Return head, rounded, and rest = exp(head - lse), so that p = exp(s - head) * rest.

    A score of a key that is seen is at most lse; so where every lse is small, head is None for 0.
    """
    lse = np.where(np.isneginf(lse), 0, lse)  # nothing is seen: every score is -inf
    if max(lse.max(initial=0.0), -lse.min(initial=0.0)) <= BOUND:
        return None, np.exp(-lse).astype(wide)
    head = lse.astype(wide)
    return head, np.exp(head - lse).astype(wide)


def _gradient_rows(do: np.ndarray, shift: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Return (rest * do, shift) as (G, R, S, D + 1): times the values and ones, rest * ds / p."""
    out = np.empty((*do.shape[:3], do.shape[3] + 1), rest.dtype)
    np.multiply(do, rest, out=out[..., :-1], dtype=rest.dtype)
    out[..., -1:] = shift
    return out


def check(q: Any, k: Any, v: Any) -> None:
    """Raise BufferMismatchError or ConfigError if the shapes do not belong together."""
    if (
        q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]
        or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]
    ):  # fmt: skip
        raise BufferMismatchError(
            explain("attention of shapes", (q.shape, k.shape, v.shape),
                    "q is [batch, queries, heads, dim], k and v [batch, keys, kv heads, dim]",
                    "Permute or reshape them")
        )  # fmt: skip
    if q.shape[2] % k.shape[2]:
        rule = f"the {q.shape[2]} query heads are a multiple of the kv heads"
        raise ConfigError(explain("kv heads", k.shape[2], rule, "Change the number of heads"))


def nothing() -> None:
    """Do nothing between tiles."""


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask, pump: Pump = nothing
) -> tuple[np.ndarray, np.ndarray]:
    """Return o (B, S, H, D) of q's dtype, and L (B, H, S) in float64.

    pump: called before every tile, so that messages advance meanwhile.
    """
    host("attention", q, k, v)
    check(q, k, v)
    return forward_cpu(q, k, v, mask, pump)


def row_delta(do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None = None) -> np.ndarray:
    """Return D (B, H, S) in float64 from do and o (B, S, H, D), and dL (B, H, S) if given."""
    wide = compute_dtype(o.dtype)
    delta = np.einsum("bshd,bshd->bhs", do.astype(wide, copy=False), o.astype(wide, copy=False))
    return delta.astype(np.float64) if dlse is None else delta - dlse.astype(np.float64)


def backward(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask, pump: Pump = nothing,
    out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of q, k and v, in `out` if given.

    lse: L, and delta: D by `row_delta`.  Where k and v are one block of a longer sequence (ring
    attention), these are the L and D of all keys, and the results are the block's part.  pump: as
    for `forward`.
    """
    host("attention", do, q, k, v)
    return backward_cpu(do, q, k, v, lse, delta, mask, pump, out)
