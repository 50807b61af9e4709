"""What the CUDA kernels on rows (n, d) share: some lanes a row, and sums over lanes and columns.

    lanes = 32     a block of 256 threads has 8 rows; lane k has columns 4k to 4k + 3, and those
                   128, 256, ... further on, read four at a time (fours.py)
    lanes = 256    rows of more than SHORT columns: one each block

Lanes add up in shared memory by halves, in float64, always in the same order, so results are the
same bits in every run.  The simulator has no shuffles, so there are none here.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import blocks, constant, cuda, device, kernel, narrow
from mpipar.kernels.fours import FOUR
from mpipar.kernels.reduce_cuda import combined

THREADS, WARP = 256, 32
SHORT = 1024  # columns
WIDE, DEEP = 32, 8  # columns of a block that sums over rows, and its threads a column
CHUNK, CHUNKS = 16, 128  # rows that are summed by one block, at least; most blocks a column


@device
def folded(mem, value, lanes, op):  # type: ignore[no-untyped-def]
    """Return the sum or maximum of the values of a row's lanes, float64; mem: a number a thread."""
    t = cuda.threadIdx.x
    mem[t] = value
    cuda.syncthreads()
    half = lanes // 2
    while half > 0:
        if (t & (lanes - 1)) < half:
            mem[t] = combined(mem[t], mem[t + half], op)
        cuda.syncthreads()
        half //= 2
    found = mem[t - (t & (lanes - 1))]
    cuda.syncthreads()
    return found


@device
def add4(four):  # type: ignore[no-untyped-def]
    """Return the sum of four numbers."""
    a, b, c, d = four
    return (a + b) + (c + d)


@device
def columns(lanes):  # type: ignore[no-untyped-def]
    """Return the first column of this thread, which has four, and the step to its next."""
    return np.int64(cuda.threadIdx.x & (lanes - 1)) * FOUR, np.int64(lanes) * FOUR


@device
def row_of(lanes):  # type: ignore[no-untyped-def]
    """Return the row of this thread."""
    return cuda.blockIdx.x * (cuda.blockDim.x // lanes) + cuda.threadIdx.x // lanes


def over_rows(code: Any, n: int, d: int, *arguments: Any, dtype: str | None = None) -> None:
    """Start a kernel on rows; its last arguments are lanes, n and d."""
    lanes = WARP if d <= SHORT else THREADS
    rows = max(1, min(THREADS // lanes, n))  # a block
    code(blocks(n, rows), rows * lanes, *arguments, lanes, n, d, dtype=dtype)


def contiguous(*arrays: Array) -> list[Array]:
    """Return the arrays, copied where they are not contiguous."""
    return [module_of(a).ascontiguousarray(a) for a in arrays]


def rows_and_columns(x: Array) -> tuple[int, int]:
    """Return n and d of x (..., d)."""
    return x.size // max(x.shape[-1], 1), x.shape[-1]


# --- sums over rows, a column each: first of chunks of rows, then of the chunks in their order ----


def chunks_of(n: int) -> tuple[int, int]:
    """Return how many chunks n rows have, and how many rows a chunk."""
    rows = max(CHUNK, blocks(n, CHUNKS))
    return blocks(n, rows), rows


@kernel("W[], T[], int64, int64", threads=THREADS, fast=False)
def total(part, out, count, d):  # type: ignore[no-untyped-def]
    """Write the sums over the chunks, part (count, d)."""
    j = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if j < d:
        found = constant(0, out)
        for k in range(count):
            found += part[k * d + j]
        out[j] = narrow(found, out)


def total_cuda(part: Array, like: Array) -> Array:
    """Return the sums over the first dimension of part (count, d), of the dtype of `like`."""
    count, d = part.shape
    out = module_of(part).empty(d, like.dtype)
    total(blocks(d, THREADS), THREADS, part, out, count, d)
    return out


def parts(sums: int, n: int, d: int, like: Array) -> Array:
    """Return room for the sums of the chunks: (sums, count, d)."""
    return module_of(like).empty((sums, chunks_of(n)[0], d), compute_dtype(like.dtype))
