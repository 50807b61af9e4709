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
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels.blocks import host, row_max

TILE = 64  # queries
SCORES = 1 << 18  # elements of a tile's scores, all of its heads: 1 MiB in float32


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
    """Queries `rows`, the number of keys the last and the first of them see."""

    rows: slice
    seen: int
    by_all: int


def _tiles(queries: int, keys: int, mask: Mask) -> Iterator[_Tile]:
    """Yield the tiles from the last to the first, which sees least."""
    for start in reversed(range(0, queries, TILE)):
        stop = min(start + TILE, queries)
        if mask.causal:
            ahead = mask.q_offset - mask.k_offset
            last, first = (min(max(ahead + i, 0), keys) for i in (stop, start + 1))
            yield _Tile(slice(start, stop), last, first)
        else:
            yield _Tile(slice(start, stop), keys, keys)


@functools.lru_cache(maxsize=64)
def _hidden(rows: int, columns: int, first: int, char: str) -> np.ndarray:
    """Return 0 where column j <= first + row i, else -inf: (rows, columns)."""
    i, j = np.arange(rows)[:, None], np.arange(columns)
    return np.where(j <= first + i, 0.0, -np.inf).astype(char)


def _groups(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield batch index and kv heads, as many as keep a tile's scores in the cache."""
    repeat = q.shape[2] // k.shape[2]
    one = repeat * min(TILE, q.shape[1]) * k.shape[1]
    step = max(1, SCORES // max(one, 1))
    for b in range(q.shape[0]):
        for g in range(0, k.shape[2], step):
            yield b, slice(g, min(g + step, k.shape[2]))


def _heads_first(x: np.ndarray, b: int, heads: slice, wide: np.dtype) -> np.ndarray:
    """Return x (B, K, G, D) at b and some heads as a contiguous (G, K, D)."""
    return np.ascontiguousarray(x[b, :, heads].transpose(1, 0, 2), wide)


class _Rows:
    """Query rows of one batch index and some kv heads: (S, H, D) seen as (G, R, S, D)."""

    def __init__(self, x: np.ndarray, b: int, heads: slice, groups: int) -> None:
        repeat = x.shape[2] // groups
        seq, width = x.shape[1], x.shape[3]
        self.view = x[b].reshape(seq, groups, repeat, width)[:, heads].transpose(1, 2, 0, 3)

    def read(self, tile: _Tile, wide: np.dtype) -> np.ndarray:
        """Return a contiguous copy of the tile's rows: (G, R * T, D)."""
        part = self.view[:, :, tile.rows]
        copy = np.array(part, wide, order="C")
        return copy.reshape(part.shape[0], -1, part.shape[3])

    def write(self, tile: _Tile, rows: np.ndarray) -> None:
        """Store (G, R * T, D) as the tile's rows."""
        target = self.view[:, :, tile.rows]
        target[...] = rows.reshape(target.shape)


def _scores(
    q: np.ndarray, keys: np.ndarray, tile: _Tile, mask: Mask, space: np.ndarray
) -> np.ndarray:
    """Return the masked scores (G, R * T, seen) of scaled queries q (G, R * T, D)."""
    shape = (q.shape[0], q.shape[1], tile.seen)
    s = np.matmul(
        q, keys[:, : tile.seen].transpose(0, 2, 1), out=space[: math.prod(shape)].reshape(shape)
    )
    if tile.by_all < tile.seen:
        rows = tile.rows.stop - tile.rows.start
        first = mask.q_offset + tile.rows.start - mask.k_offset - tile.by_all
        edge = s.reshape(shape[0], -1, rows, tile.seen)[..., tile.by_all :]
        edge += _hidden(rows, tile.seen - tile.by_all, first, s.dtype.char)
    return s


def forward_cpu(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """Return o and L, tile by tile."""
    batch, seq, heads, _ = q.shape
    keys, groups = k.shape[1:3]
    out = np.empty((batch, seq, heads, v.shape[3]), q.dtype)
    lse = np.empty((batch, groups, heads // groups, seq))
    wide = compute_dtype(q.dtype)
    space = np.empty(_space(q, k), wide)
    for b, some in _groups(q, k):
        keys_, values = _heads_first(k, b, some, wide), _heads_first(v, b, some, wide)
        queries, results = _Rows(q, b, some, groups), _Rows(out, b, some, groups)
        for tile in _tiles(seq, keys, mask):
            stats = lse[b, some, :, tile.rows]  # (G, R, T)
            if not tile.seen:
                results.view[:, :, tile.rows] = 0
                stats[...] = -np.inf
                continue
            rows = queries.read(tile, wide)
            rows *= mask.scale
            s = _scores(rows, keys_, tile, mask, space)
            top = row_max(s)
            if not tile.by_all:
                np.maximum(top, np.finfo(wide).min, out=top)  # a row that sees nothing has -inf
            s -= top
            np.exp(s, out=s)
            total = s @ np.ones((tile.seen, 1), wide)
            if not tile.by_all:
                top[total == 0] = -np.inf
                total[total == 0] = 1
            o = s @ values[:, : tile.seen]
            o /= total
            results.write(tile, o)
            stats[...] = (top + np.log(total, dtype=np.float64)).reshape(stats.shape)
    return out, lse.reshape(batch, heads, seq)


def _space(q: np.ndarray, k: np.ndarray) -> int:
    """Return the elements of the largest tile's scores."""
    heads = max((s.stop - s.start for _, s in _groups(q, k)), default=0)
    return heads * (q.shape[2] // k.shape[2]) * min(TILE, q.shape[1]) * k.shape[1]


def backward_cpu(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the gradients of q, k and v, tile by tile; lse and delta (B, H, S) are float64."""
    groups = k.shape[2]
    wide = compute_dtype(q.dtype)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    space = np.empty((2, _space(q, k)), wide)
    lse = np.where(np.isneginf(lse), 0, lse)  # rows that see nothing: every score is -inf
    head = lse.astype(wide)
    rest = np.exp(head - lse)  # p = exp(s - head) * rest
    rows_of = (q.shape[0], groups, q.shape[2] // groups, q.shape[1])
    per_row = [x.reshape(rows_of) for x in (head, rest.astype(wide), (delta * rest).astype(wide))]
    for b, some in _groups(q, k):
        kv = _heads_first(k, b, some, wide), _heads_first(v, b, some, wide)
        sums = np.zeros_like(kv[0]), np.zeros_like(kv[1])
        queries, grads, results = (_Rows(x, b, some, groups) for x in (q, do, dq))
        for tile in _tiles(q.shape[1], k.shape[1], mask):
            if not tile.seen:
                results.view[:, :, tile.rows] = 0
                continue
            stats = [np.ascontiguousarray(x[b, some, :, tile.rows]) for x in per_row]
            rows, g = queries.read(tile, wide), grads.read(tile, wide)
            rows *= mask.scale
            dq_rows = _backward_tile(rows, g, kv, sums, stats, tile, mask, space)
            results.write(tile, dq_rows)
        dk[b, :, some] = sums[0].transpose(1, 0, 2)
        dv[b, :, some] = sums[1].transpose(1, 0, 2)
    return dq, dk, dv


def _backward_tile(
    q: np.ndarray, do: np.ndarray, kv: tuple[np.ndarray, np.ndarray],
    sums: tuple[np.ndarray, np.ndarray], stats: list[np.ndarray], tile: _Tile, mask: Mask,
    space: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Add a tile's part to the sums of dk and dv (G, K, D), and return its dq (G, R * T, D)."""
    head, rest, delta = (x.reshape(x.shape[0], -1, 1) for x in stats)
    keys, values = (x[:, : tile.seen] for x in kv)
    p = _scores(q, kv[0], tile, mask, space[0])
    p -= head
    np.exp(p, out=p)
    do *= rest
    sums[1][:, : tile.seen] += p.transpose(0, 2, 1) @ do
    ds = np.matmul(do, values.transpose(0, 2, 1), out=space[1, : p.size].reshape(p.shape))
    ds -= delta
    ds *= p
    sums[0][:, : tile.seen] += ds.transpose(0, 2, 1) @ q
    dq = ds @ keys
    dq *= mask.scale
    return dq


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


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask
) -> tuple[np.ndarray, np.ndarray]:
    """Return o (B, S, H, D) of q's dtype, and L (B, H, S) in float64."""
    host("attention", q, k, v)
    check(q, k, v)
    return forward_cpu(q, k, v, mask)


def row_delta(do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None = None) -> np.ndarray:
    """Return D (B, H, S) in float64 from do and o (B, S, H, D), and dL (B, H, S) if given."""
    wide = compute_dtype(o.dtype)
    delta = np.einsum("bshd,bshd->bhs", do.astype(wide, copy=False), o.astype(wide, copy=False))
    return delta.astype(np.float64) if dlse is None else delta - dlse.astype(np.float64)


def backward(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the gradients of q, k and v.

    lse: L, and delta: D by `row_delta`.  Where k and v are one block of a longer sequence (ring
    attention), these are the L and D of all keys, and the results are the block's part.
    """
    host("attention", do, q, k, v)
    return backward_cpu(do, q, k, v, lse, delta, mask)
