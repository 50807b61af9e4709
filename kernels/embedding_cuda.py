"""Embedding on a GPU (the formulas: kernels/embedding.py).

The gradient sorts the ids, keeping the order of equal ones.  The block of each first one among
equal ids adds their rows, one after the other, and writes the sum; other blocks have nothing to do.

    ids     3  1  3  0           sorted  0  1  3  3      blocks   0: dw[0] = g[3]   1: dw[1] = g[1]
    place   0  1  2  3           order   3  1  0  2               2: dw[3] = g[0] + g[2]   3: none
"""

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import FLOATS, constant, cuda, kernel, narrow, widen
from mpipar.kernels.rows_cuda import THREADS, WARP, contiguous, over_rows, row_of

KINDS = (*FLOATS, "int32", "int64")


@kernel(
    "T[], int64[], T[], int32, int64, int64",
    dtypes=KINDS,
    threads=THREADS,
    fast=False,
)
def rows(w, ids, y, lanes, n, d):  # type: ignore[no-untyped-def]
    """Copy the rows of w at ids."""
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    if row < n:
        source, target = ids[row] * d, row * d
        for j in range(lane, d, lanes):
            y[target + j] = w[source + j]


@kernel("T[], int64[], int64[], T[], int64, int64", threads=THREADS, fast=False)
def add(g, ids, order, dw, n, d):  # type: ignore[no-untyped-def]
    """Write the sums of the rows of g at equal ids, which are sorted."""
    first = np.int64(cuda.blockIdx.x)
    found = ids[first]
    if first == 0 or ids[first - 1] != found:
        for j in range(cuda.threadIdx.x, d, cuda.blockDim.x):
            total, k = constant(0, g), first
            while k < n and ids[k] == found:
                total += widen(g[order[k] * d + j])
                k += 1
            dw[found * d + j] = narrow(total, dw)


def gather_cuda(w: Array, ids: Array) -> Array:
    """Return the rows (..., D) of w (num, D) at ids (...), which are within 0..num-1."""
    w, flat = contiguous(w, ids.reshape(-1).astype(np.int64, copy=False))
    y = module_of(w).empty((*ids.shape, w.shape[1]), w.dtype)
    over_rows(rows, flat.size, w.shape[1], w, flat, y)
    return y


def scatter_add_cuda(g: Array, ids: Array, num: int) -> Array:
    """Return dw (num, D): the sum of the rows of g (..., D) at each of ids (...)."""
    xp, d = module_of(g), g.shape[-1]
    (g,), flat = contiguous(g), ids.reshape(-1).astype(np.int64, copy=False)
    dw = xp.zeros((num, d), g.dtype)
    order = xp.argsort(flat, kind="stable").astype(np.int64, copy=False)
    threads = min(THREADS, -(-max(d, 1) // WARP) * WARP)
    add(flat.size, threads, g, flat[order], order, dw, flat.size, d)
    return dw
