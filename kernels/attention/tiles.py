"""How attention is cut: tiles of queries, groups of heads, and keys laid out for the products."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.attention.formula import Mask

TILE = 64  # queries; twice as many for long rows of keys, whose edge is a smaller share
LONG = 512  # keys
SCORES = 1 << 17  # elements of a tile's scores, all of its heads: 512 KiB in float32


class Tile(NamedTuple):
    """Queries `rows`, and the number of keys that the last and the first of them see."""

    rows: slice
    seen: int
    by_all: int


def tile_size(queries: int, keys: int) -> int:
    """Return the number of queries of a tile."""
    return max(1, min(TILE if keys <= LONG else 2 * TILE, queries))


def tiles(queries: int, keys: int, mask: Mask) -> Iterator[Tile]:
    """Yield the tiles of the queries."""
    size = tile_size(queries, keys)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        if mask.causal:
            ahead = mask.q_offset - mask.k_offset
            last, first = (min(max(ahead + i, 0), keys) for i in (stop, start + 1))
            yield Tile(slice(start, stop), last, first)
        else:
            yield Tile(slice(start, stop), keys, keys)


def groups_of(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield batch index and kv heads, as many as keep a tile's scores in the cache."""
    repeat = q.shape[2] // k.shape[2]
    one = repeat * tile_size(q.shape[1], k.shape[1]) * k.shape[1]
    step = max(1, SCORES // max(one, 1))
    for b in range(q.shape[0]):
        for g in range(0, k.shape[2], step):
            yield b, slice(g, min(g + step, k.shape[2]))


def space_for(q: np.ndarray, k: np.ndarray) -> int:
    """Return the elements of the largest tile's scores."""
    heads = max((s.stop - s.start for _, s in groups_of(q, k)), default=0)
    return heads * (q.shape[2] // k.shape[2]) * tile_size(q.shape[1], k.shape[1]) * k.shape[1]


def rows_of(x: np.ndarray, b: int, heads: slice, groups: int) -> np.ndarray:
    """Return the query rows x (B, S, H, D) of a batch index and kv heads as a view (G, R, S, D)."""
    _, seq, count, width = x.shape
    by_group = x[b].reshape(seq, groups, count // groups, width)
    return by_group[:, heads].transpose(1, 2, 0, 3)


def tile_rows(rows: np.ndarray, tile: Tile, wide: np.dtype) -> np.ndarray:
    """Return the tile's rows (G, R * T, D): a view if R is 1 and nothing is widened."""
    part = rows[:, :, tile.rows]
    return part.reshape(part.shape[0], -1, part.shape[3]).astype(wide, copy=False)


def product_into(target: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Write x @ y (G, R * T, D) into the view target (G, R, T, D)."""
    if target.shape[1] == 1 and target.dtype == x.dtype:
        np.matmul(x, y, out=target[:, 0])
    else:
        target[...] = (x @ y).reshape(target.shape)


def across(x: np.ndarray, extra: int = 0) -> np.ndarray:
    """Return x (G, K, D) as a contiguous (G, D + extra, K), with rows of ones as the extra."""
    g, k, d = x.shape
    out = np.ones((g, d + extra, k), x.dtype)
    for start in range(0, k, 64):  # chunks of columns stay in the cache
        out[:, :d, start : start + 64] = x[:, start : start + 64].transpose(0, 2, 1)
    return out


class Keys:
    """Keys (times the scale) and values of a batch index and some heads, to suit the products."""

    def __init__(self, k: np.ndarray, v: np.ndarray, b: int, some: slice, mask: Mask) -> None:
        self.mask = mask
        wide = compute_dtype(k.dtype)
        self.keys = np.empty((some.stop - some.start, k.shape[1], k.shape[3]), wide)  # (G, K, D)
        np.multiply(k[b, :, some].transpose(1, 0, 2), mask.scale, out=self.keys, dtype=wide)
        self.values = np.ascontiguousarray(v[b, :, some].transpose(1, 0, 2), wide)
        self.across = across(self.keys)

    def scores(self, q: np.ndarray, tile: Tile, space: np.ndarray) -> np.ndarray:
        """Return the masked scores (G, R * T, seen) of queries q (G, R * T, D)."""
        shape = (q.shape[0], q.shape[1], tile.seen)
        s = space[: math.prod(shape)].reshape(shape)
        np.matmul(q, self.across[:, :, : tile.seen], out=s)
        if tile.by_all < tile.seen:
            rows = tile.rows.stop - tile.rows.start
            ahead = self.mask.q_offset + tile.rows.start - self.mask.k_offset - tile.by_all
            edge = s.reshape(s.shape[0], -1, rows, tile.seen)[..., tile.by_all :]
            np.copyto(edge, -np.inf, where=_hidden(rows, tile.seen - tile.by_all, ahead))
        return s


@functools.lru_cache(maxsize=64)
def _hidden(rows: int, columns: int, ahead: int) -> np.ndarray:
    """Return where column j > ahead + row i: (rows, columns)."""
    return np.arange(columns) > ahead + np.arange(rows)[:, None]
