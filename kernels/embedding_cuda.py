"""Embedding on a GPU (the formulas: kernels/embedding.py).

Rows are copied as words, 16 bytes at a time where they are aligned.

The gradient sorts the ids, keeping the order of equal ones, and cuts what is sorted into pieces of
PIECE.  A thread adds the rows of one piece in one column: the sum of an id that lies within the
piece is written, and what goes on before or behind it is left for `join`, which adds the parts of
an id in their order.  So no id is added by one thread alone, and no sum depends on who is first.

    sorted ids   0 0 1 5 | 5 5 5 5 | 5 7 8 8     dw[0], dw[1] | nothing | dw[7], dw[8]
    left                5   5 5 5 5   5          dw[5] = 5 + 5 5 5 5 + 5, by the first piece
"""

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import blocks, constant, cuda, device, kernel, narrow, widen
from mpipar.kernels.permute import SIXTEEN, WORDS, aligned
from mpipar.kernels.ptx import address, load4, store4
from mpipar.kernels.rows_cuda import THREADS, WARP, contiguous, over_rows, row_of

PIECE = 32  # rows


@kernel(
    "T[], int64[], T[], int64, int32, int64, int64",
    dtypes=tuple(WORDS.values()),
    threads=THREADS,
    fast=False,
)
def rows(w, ids, y, num, lanes, n, d):  # type: ignore[no-untyped-def]
    """Copy the rows of w (num, d) at ids (n); zeros for an id that is none of its."""
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    if row < n:
        found, target = ids[row], row * d
        for j in range(lane, d, lanes):
            y[target + j] = w[found * d + j] if 0 <= found < num else 0


@kernel(
    "T[], int64[], T[], int64, int32, int64, int64",
    dtypes=("uint32",),
    threads=THREADS,
    fast=False,
)
def rows16(w, ids, y, num, lanes, n, d):  # type: ignore[no-untyped-def]
    """Do so, 16 bytes at a time: d in pieces of 16 bytes."""
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    if row < n:
        found, target = ids[row], row * d
        none = np.uint32(0)
        for j in range(lane, d, lanes):
            place = address(y, 4 * (target + j))
            if 0 <= found < num:
                a, b, c, e = load4(address(w, 4 * (found * d + j)))
                store4(place, a, b, c, e)
            else:
                store4(place, none, none, none, none)


@device
def goes_on(ids, end, n):  # type: ignore[no-untyped-def]
    """Say whether the sorted id before `end` is that at `end` too."""
    return 0 < end < n and ids[end - 1] == ids[end]


@kernel("T[], int64[], int64[], T[], W[], int64, int64, int64", threads=THREADS, fast=False)
def add(g, ids, order, dw, part, num, n, d):  # type: ignore[no-untyped-def]
    """Add the rows of g (n, d) of a piece; write sums, or leave them in part (pieces, 2, d)."""
    piece = np.int64(cuda.blockIdx.x)
    j = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
    first = piece * PIECE
    stop = min(first + PIECE, n)
    if j < d:
        k = first
        while k < stop:
            start, found, total = k, ids[k], constant(0, g)
            while k < stop and ids[k] == found:
                total += widen(g[order[k] * d + j])
                k += 1
            if start == first and goes_on(ids, first, n):
                part[2 * piece * d + j] = total
            elif k == stop and goes_on(ids, stop, n):
                part[(2 * piece + 1) * d + j] = total
            elif 0 <= found < num:
                dw[found * d + j] = narrow(total, dw)


@kernel("int64[], T[], W[], int64, int64, int64", threads=THREADS, fast=False)
def join(ids, dw, part, num, n, d):  # type: ignore[no-untyped-def]
    """Add the parts of the id that begins in a piece and goes on behind it."""
    piece = np.int64(cuda.blockIdx.x)
    j = np.int64(cuda.blockIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
    first, end = piece * PIECE, (piece + 1) * PIECE
    if j < d and goes_on(ids, end, n):
        found = ids[end]
        here = ids[first] != found or not goes_on(ids, first, n)  # it begins
        if here and 0 <= found < num:
            total, k = part[(2 * piece + 1) * d + j], piece + 1
            more = True
            while more:
                total += part[2 * k * d + j]
                k += 1
                more = k * PIECE < n and ids[k * PIECE - 1] == found and ids[k * PIECE] == found
            dw[found * d + j] = narrow(total, dw)


def gather_cuda(w: Array, ids: Array) -> Array:
    """Return the rows (..., D) of w (num, D) at ids (...); zeros for ids outside 0..num-1."""
    w, flat = contiguous(w, ids.reshape(-1).astype(np.int64, copy=False))
    num, d = w.shape
    y = module_of(w).empty((*ids.shape, d), w.dtype)
    width = d * w.itemsize
    wide = width % SIXTEEN == 0 and aligned(w, y)
    word = "uint32" if wide else WORDS[w.itemsize]
    words = w.reshape(-1).view(word), flat, y.reshape(-1).view(word)
    over_rows(rows16 if wide else rows, flat.size, width // SIXTEEN if wide else d, *words, num)
    return y


def scatter_add_cuda(g: Array, ids: Array, num: int) -> Array:
    """Return dw (num, D): the sum of the rows of g (..., D) at each of ids (...).

    Rows at ids outside 0..num-1 are left out.
    """
    xp, d = module_of(g), g.shape[-1]
    (g,), flat = contiguous(g), ids.reshape(-1).astype(np.int64, copy=False)
    dw, pieces = xp.zeros((num, d), g.dtype), blocks(flat.size, PIECE)
    order = xp.argsort(flat, kind="stable").astype(np.int64, copy=False)
    ids, part = flat[order], xp.empty(2 * pieces * d, compute_dtype(g.dtype))
    threads = min(THREADS, -(-max(d, 1) // WARP) * WARP)
    grid = pieces, blocks(d, threads)
    add(grid, threads, g, ids, order, dw, part, num, flat.size, d)
    join(grid, threads, ids, dw, part, num, flat.size, d)
    return dw
