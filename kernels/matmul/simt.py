"""The product by ordinary arithmetic, any number type: each thread has 4 x 4 sums.

A block of 256 threads computes 64 x 64 elements of C.  In steps of 8 along k it holds a slice of
op(A) and of op(B) in shared memory, twice, so that the next is written while one is read; what
is beyond is read from global memory before a step's arithmetic and written after it.

    shared:  a 8 x 64 | b 8 x 64 | the same again      thread (y, x) of 16 x 16:
             then the 64 x 64 sums                      rows 4y..4y+3, columns 4x..4x+3

Slices are read 16 bytes at a time without bank conflicts; their rows are 68 long, so that one
whose k is contiguous in memory is also written without.  Sums are float32, or float64 of
float64; they pass through shared memory so that C is written along its rows.
"""

from typing import Any

import numpy as np

from mpipar.kernels.device import Kernel, constant, cuda, device, kernel, widen
from mpipar.kernels.matmul.epilogue import TRANSPOSE_A, TRANSPOSE_B, finish, tile_of
from mpipar.kernels.ptx import quad

TILE, STEP, SIDE, THREADS = 64, 8, 16, 256
ROW = TILE + 4
SLICE = STEP * ROW
BOTH = 2 * SLICE  # a slice of op(A) and one of op(B)
MEMORY = max(2 * BOTH, TILE * TILE)
EACH = TILE * STEP // THREADS  # elements of a slice that a thread reads
TAKES = "T[], T[], T[], T[], T[], T[], int64, int64, int64, int64, int64, int32"
SINGLE = ("float32", "float16", "bfloat16")


@device
def element(i: Any, x: Any, base: Any, first: Any, k0: Any, size: Any, k: Any, k_rows: Any) -> Any:
    """Return this thread's i-th element of a slice of [size, k], or of [k, size] if `k_rows`."""
    t = cuda.threadIdx.x
    at, along = first + t // STEP + THREADS // STEP * i, k0 + t % STEP
    if k_rows:
        at, along = first + t % TILE, k0 + t // TILE + THREADS // TILE * i
    value = constant(0, x)
    if at < size and along < k:
        value = widen(x[base + (along * size + at if k_rows else at * k + along)])
    return value


@device
def place(i: Any, k_rows: Any) -> Any:
    """Return where that element is in a slice."""
    t = cuda.threadIdx.x
    if k_rows:
        return (t // TILE + THREADS // TILE * i) * ROW + t % TILE
    return t % STEP * ROW + t // STEP + THREADS // STEP * i


def _product(name: str, wide: Any, dtypes: tuple[str, ...]) -> Kernel:
    """Make the kernel whose sums are of type `wide`."""

    def product(a, b, c, bias, up, residual, m, n, k, a_step, b_step, flags):  # type: ignore[no-untyped-def]
        # a_step, b_step: elements from one matrix of a batch to the next
        mem = cuda.shared.array(MEMORY, wide)
        sums = cuda.local.array(16, wide)
        next_a = cuda.local.array(EACH, wide)
        next_b = cuda.local.array(EACH, wide)
        for i in range(16):
            sums[i] = constant(0, c)
        t = cuda.threadIdx.x
        y, x = t // SIDE * 4, t % SIDE * 4
        batch, row, column = tile_of(cuda.blockIdx.x, m, n, TILE, TILE)
        a_base, b_base = batch * a_step, batch * b_step
        a_rows, b_rows = flags & TRANSPOSE_A != 0, flags & TRANSPOSE_B == 0  # whose k are rows
        for i in range(EACH):
            mem[place(i, a_rows)] = element(i, a, a_base, row, 0, m, k, a_rows)
            mem[SLICE + place(i, b_rows)] = element(i, b, b_base, column, 0, n, k, b_rows)
        cuda.syncthreads()
        half = 0
        for k0 in range(0, k, STEP):
            for i in range(EACH):
                next_a[i] = element(i, a, a_base, row, k0 + STEP, m, k, a_rows)
                next_b[i] = element(i, b, b_base, column, k0 + STEP, n, k, b_rows)
            for along in range(STEP):
                a0, a1, a2, a3 = quad(mem, half + along * ROW + y)
                b0, b1, b2, b3 = quad(mem, half + SLICE + along * ROW + x)
                sums[0] += a0 * b0
                sums[1] += a0 * b1
                sums[2] += a0 * b2
                sums[3] += a0 * b3
                sums[4] += a1 * b0
                sums[5] += a1 * b1
                sums[6] += a1 * b2
                sums[7] += a1 * b3
                sums[8] += a2 * b0
                sums[9] += a2 * b1
                sums[10] += a2 * b2
                sums[11] += a2 * b3
                sums[12] += a3 * b0
                sums[13] += a3 * b1
                sums[14] += a3 * b2
                sums[15] += a3 * b3
            half = BOTH - half
            for i in range(EACH):
                mem[half + place(i, a_rows)] = next_a[i]
                mem[half + SLICE + place(i, b_rows)] = next_b[i]
            cuda.syncthreads()
        for i in range(4):
            for j in range(4):
                mem[(y + i) * TILE + x + j] = sums[4 * i + j]
        cuda.syncthreads()
        for e in range(t, TILE * TILE, THREADS):
            at, along = row + e // TILE, column + e % TILE
            finish(mem[e], c, bias, up, residual, batch, at, along, m, n, flags)

    product.__name__ = name
    return kernel(TAKES, dtypes=dtypes, threads=THREADS)(product)


single = _product("single", np.dtype(np.float32), SINGLE)
double = _product("double", np.dtype(np.float64), ("float64",))
PRODUCT = dict.fromkeys(SINGLE, single) | {"float64": double}
