"""The product by ordinary arithmetic, for float32 and float64: each thread has 8 x 8 sums.

A block of 256 threads computes 128 x 128 elements of C.  In steps of 8 along k it holds a slice of
op(A) and of op(B) in shared memory, twice, so that the next is written while one is read; what
is beyond is read from global memory before a step's arithmetic and written after it.

    shared, [k][128]:  a, b     thread (y, x) of 16 x 16:  rows 4y..4y+3 and 64 + those,
                                                           columns 4x..4x+3 and 64 + those
Reads of a quarter of shared memory's rows are 16 bytes wide and without bank conflicts; rows are
132 long, so that a slice whose k is contiguous in memory is also written without.
"""

from typing import Any

from mpipar.kernels.device import constant, cuda, device, kernel
from mpipar.kernels.matmul.epilogue import finish, tile_of
from mpipar.kernels.ptx import quad

TILE = 128
STEP = 8  # along k
ROW = TILE + 4
SLICE = STEP * ROW
TWO = 2 * SLICE
THREADS = 256
TAKES = "T[], T[], T[], T[], T[], T[], int64, int64, int64, int64, int64, int32"


@device
def fetch(held: Any, x: Any, base: Any, first: Any, k0: Any, size: Any, k: Any, k_rows: Any) -> Any:
    """Read this thread's 4 elements of a slice: from [size, k], or [k, size] if `k_rows`."""
    thread = cuda.threadIdx.x
    for i in range(4):
        at, along = thread // STEP + 32 * i, thread % STEP
        if k_rows:
            at, along = thread % TILE, thread // TILE + 2 * i
        at += first
        along += k0
        held[i] = constant(0, x)
        if at < size and along < k:
            held[i] = x[base + (along * size + at if k_rows else at * k + along)]


@device
def put(shared: Any, start: Any, held: Any, k_rows: Any) -> Any:
    """Write what `fetch` read to shared memory, as [k][128]."""
    thread = cuda.threadIdx.x
    for i in range(4):
        at, along = thread // STEP + 32 * i, thread % STEP
        if k_rows:
            at, along = thread % TILE, thread // TILE + 2 * i
        shared[start + along * ROW + at] = held[i]


@device
def row_of(
    sums: Any,
    at: Any,
    a: Any,
    b0: Any,
    b1: Any,
    b2: Any,
    b3: Any,
    b4: Any,
    b5: Any,
    b6: Any,
    b7: Any,
) -> Any:
    """Add a's products to 8 sums."""
    sums[at + 0] += a * b0
    sums[at + 1] += a * b1
    sums[at + 2] += a * b2
    sums[at + 3] += a * b3
    sums[at + 4] += a * b4
    sums[at + 5] += a * b5
    sums[at + 6] += a * b6
    sums[at + 7] += a * b7


@device
def multiply(sums: Any, left: Any, right: Any, start: Any) -> Any:
    """Add the products of one slice to this thread's 8 x 8 sums."""
    y, x = cuda.threadIdx.x // 16 * 4, cuda.threadIdx.x % 16 * 4
    for along in range(STEP):
        row = start + along * ROW
        a0, a1, a2, a3 = quad(left, row + y)
        a4, a5, a6, a7 = quad(left, row + y + 64)
        b0, b1, b2, b3 = quad(right, row + x)
        b4, b5, b6, b7 = quad(right, row + x + 64)
        row_of(sums, 0, a0, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 8, a1, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 16, a2, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 24, a3, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 32, a4, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 40, a5, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 48, a6, b0, b1, b2, b3, b4, b5, b6, b7)
        row_of(sums, 56, a7, b0, b1, b2, b3, b4, b5, b6, b7)


@device
def tile(
    left: Any, right: Any, sums: Any, next_a: Any, next_b: Any,
    a: Any, b: Any, c: Any, bias: Any, up: Any, residual: Any,
    m: Any, n: Any, k: Any, a_step: Any, b_step: Any, flags: Any,
) -> Any:  # fmt: skip
    """C = epilogue(op(A) op(B)) of one tile, in the memory of its number type."""
    for i in range(64):
        sums[i] = constant(0, c)
    batch, first_row, first_column = tile_of(cuda.blockIdx.x, m, n, TILE, TILE)
    a_base, b_base = batch * a_step, batch * b_step
    a_rows, b_rows = flags & 1 != 0, flags & 2 == 0  # whose rows run along k
    fetch(next_a, a, a_base, first_row, 0, m, k, a_rows)
    fetch(next_b, b, b_base, first_column, 0, n, k, b_rows)
    put(left, 0, next_a, a_rows)
    put(right, 0, next_b, b_rows)
    cuda.syncthreads()
    half = 0
    for k0 in range(0, k, STEP):
        more = k0 + STEP < k
        if more:
            fetch(next_a, a, a_base, first_row, k0 + STEP, m, k, a_rows)
            fetch(next_b, b, b_base, first_column, k0 + STEP, n, k, b_rows)
        multiply(sums, left, right, half)
        half = SLICE - half
        if more:
            put(left, half, next_a, a_rows)
            put(right, half, next_b, b_rows)
        cuda.syncthreads()
    y, x = cuda.threadIdx.x // 16, cuda.threadIdx.x % 16 * 4
    for i in range(8):  # row i of all threads: 16 rows of C, each 4 apart
        for j in range(4):
            left[y * TILE + x + j] = sums[i * 8 + j]
            left[y * TILE + x + j + 64] = sums[i * 8 + j + 4]
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, 16 * TILE, THREADS):
            row = first_row + e // TILE * 4 + i % 4 + i // 4 * 64
            finish(left[e], c, bias, up, residual, batch, row, first_column + e % TILE, m, n, flags)
        cuda.syncthreads()


@kernel(TAKES, dtypes=("float32",), threads=THREADS)
def single(
    a: Any, b: Any, c: Any, bias: Any, up: Any, residual: Any,
    m: Any, n: Any, k: Any, a_step: Any, b_step: Any, flags: Any,
) -> None:  # fmt: skip
    """The product in float32; a_step, b_step: elements from one matrix of a batch to the next."""
    left = cuda.shared.array(TWO, "float32")
    right = cuda.shared.array(TWO, "float32")
    sums, next_a = cuda.local.array(64, "float32"), cuda.local.array(4, "float32")
    next_b = cuda.local.array(4, "float32")
    tile(
        left, right, sums, next_a, next_b, a, b, c, bias, up, residual,
        m, n, k, a_step, b_step, flags,
    )  # fmt: skip


@kernel(TAKES, dtypes=("float64",), threads=THREADS)
def double(
    a: Any, b: Any, c: Any, bias: Any, up: Any, residual: Any,
    m: Any, n: Any, k: Any, a_step: Any, b_step: Any, flags: Any,
) -> None:  # fmt: skip
    """The product in float64."""
    left = cuda.shared.array(TWO, "float64")
    right = cuda.shared.array(TWO, "float64")
    sums, next_a = cuda.local.array(64, "float64"), cuda.local.array(4, "float64")
    next_b = cuda.local.array(4, "float64")
    tile(
        left, right, sums, next_a, next_b, a, b, c, bias, up, residual,
        m, n, k, a_step, b_step, flags,
    )  # fmt: skip
