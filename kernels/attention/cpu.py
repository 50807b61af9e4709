"""Attention on the CPU by NumPy, tile by tile: products by BLAS, exponentials in between."""

import math

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.attention.formula import Gradients, Mask, Pump
from mpipar.kernels.attention.tiles import (
    Keys,
    across,
    groups_of,
    product_into,
    rows_of,
    space_for,
    tile_rows,
    tiles,
)
from mpipar.kernels.blocks import row_max

BOUND = 30.0  # e^30, and sums of it, are far from the limits of float32
SMALL, LARGE = math.exp(-BOUND), math.exp(BOUND)


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
    space = np.empty(space_for(q, k), wide)
    for b, some in groups_of(q, k):
        queries, results = (rows_of(x, b, some, groups) for x in (q, out))
        keys = Keys(k, v, b, some, mask)
        for tile in tiles(seq, k.shape[1], mask):
            pump()
            target, total = results[:, :, tile.rows], totals[b, some, :, tile.rows]
            if not tile.seen:
                target[...], total[...] = 0, 0
                continue
            rows, ones = tile_rows(queries, tile, wide), np.ones((tile.seen, 1), wide)
            s = keys.scores(rows, tile, space)
            with np.errstate(over="ignore"):
                product_into(total, np.exp(s, out=s), ones)
            if not (total.min() >= SMALL and total.max() <= LARGE):
                s = keys.scores(rows, tile, space)
                tops[b, some, :, tile.rows] = _subtract_top(s).reshape(total.shape)
                product_into(total, np.exp(s, out=s), ones)
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
    space = np.empty((2, space_for(q, k)), wide)
    per_row = (q.shape[0], groups, q.shape[2] // groups, q.shape[1], 1)
    head, rest = split(lse.reshape(per_row), wide)
    shift = np.multiply(delta.reshape(per_row), -rest)
    for b, some in groups_of(q, k):
        queries, grads, results = (rows_of(x, b, some, groups) for x in (q, do, dq))
        grads = _gradient_rows(grads, shift[b, some], rest[b, some])
        keys = Keys(k, v, b, some, mask)
        values = across(keys.values, extra=1)
        sums = np.empty_like(keys.keys), np.empty_like(keys.values)  # dk and dv (G, K, D)
        done = 0  # keys whose sums have begun
        for tile in reversed(list(tiles(q.shape[1], k.shape[1], mask))):
            pump()
            target = results[:, :, tile.rows]
            if not tile.seen:
                target[...] = 0
                continue
            rows, g = (tile_rows(x, tile, wide) for x in (queries, grads))
            tops = None if head is None else head[b, some, :, tile.rows]
            p = keys.scores(rows, tile, space[0])
            ds = space[1, : p.size].reshape(p.shape)
            np.matmul(g, values[:, :, : tile.seen], out=ds)
            p = p if tops is None else np.subtract(p, tops.reshape(*p.shape[:2], 1), out=p)
            ds *= np.exp(p, out=p)
            _add_product(sums[1], p, g[..., :-1], done)
            _add_product(sums[0], ds, rows, done)
            done = max(done, tile.seen)
            product_into(target, ds, keys.keys[:, : tile.seen])
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


def split(lse: np.ndarray, wide: np.dtype) -> tuple[np.ndarray | None, np.ndarray]:
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
