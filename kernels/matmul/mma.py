"""The product on tensor cores, for bfloat16 and float16: sums in float32, rounded once.

A block of 4 warps computes 64 x 64 elements of C, a warp 32 x 32: 2 x 4 products of 16 x 8, whose
sums stay in 32 registers a thread.  In steps of 32 along k, slices of op(A) and op(B) come by
asynchronous copies of 16 bytes into a ring of 3 in shared memory: two are under way while one is
multiplied.

    slice of a matrix whose rows run along k      [64][32]    piece c of row r at  c ^ (r / 2 % 4)
    slice of one whose rows run across k          [32][64]    piece c of row r at  c ^ (r % 8)

Pieces are 8 elements.  So placed, neither the 8 that are written together nor the 8 that one part
of ldmatrix reads meet in a bank.  Matrices whose rows do not begin at 16 bytes go element by
element.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.kernels.device import Kernel, blocks, constant, cuda, device, kernel, narrow
from mpipar.kernels.matmul.epilogue import TRANSPOSE_A, TRANSPOSE_B, finish, tile_of
from mpipar.kernels.ptx import address, shared_address
from mpipar.kernels.ptx_mma import (
    commit_copies,
    copy16,
    ldmatrix,
    ldmatrix_turned,
    mma_bf16,
    mma_f16,
    wait_copies,
)

TILE, STEP, PIECE = 64, 32, 8
SLICE = TILE * STEP
STAGES = 3
RING = 2 * STAGES * SLICE
PITCH = TILE + 8  # of the sums in shared memory
SUMS = TILE * PITCH
THREADS = 128
PLAIN_A, PLAIN_B = 1 << 8, 1 << 9  # of flags: rows that do not begin at 16 bytes
TAKES = "T[], T[], T[], T[], T[], T[], int64, int64, int64, int64, int64, int32"


@device
def place(row: Any, piece: Any, across: Any) -> Any:
    """Return where a slice has a piece: its first element."""
    if across:
        return row * TILE + (piece ^ (row & 7)) * PIECE
    return row * STEP + (piece ^ ((row >> 1) & 3)) * PIECE


@device
def fetch(
    ring: Any, start: Any, x: Any, base: Any, first: Any, k0: Any, size: Any, k: Any,
    across: Any, plain: Any,
) -> Any:  # fmt: skip
    """Start to copy a slice of [size, k], or of [k, size] if `across`; zeros where it ends."""
    rows, columns, row0, column0 = size, k, first, k0
    if across:
        rows, columns, row0, column0 = k, size, k0, first
    for i in range(SLICE // PIECE // THREADS):
        e = cuda.threadIdx.x + i * THREADS
        row, piece = (e >> 3, e & 7) if across else (e >> 2, e & 3)
        target = start + place(row, piece, across)
        column = column0 + piece * PIECE
        source = base + (row0 + row) * columns + column
        left = columns - column if row0 + row < rows else 0
        if plain:
            for j in range(PIECE):
                value = narrow(constant(0, x), x)
                if j < left:
                    value = x[source + j]
                ring[target + j] = value
        else:
            count = 2 * PIECE if left >= PIECE else 0
            copy16(
                shared_address(ring, target),
                address(x, source if count else base),
                np.int32(count),
            )


@device
def words(ring: Any, start: Any, at: Any, k0: Any, across: Any, at_bit: Any, k_bit: Any) -> Any:
    """Read four 8 x 8 matrices: `at_bit` of the lane chooses rows of C or + 8, `k_bit` those of k.

    So lanes come in the order of a fragment of A, or of two of B.
    """
    lane = cuda.threadIdx.x & 31
    at += ((lane >> at_bit) & 1) * PIECE
    k0 += ((lane >> k_bit) & 1) * PIECE
    if across:
        found = place(k0 + (lane & 7), at >> 3, across)
        return ldmatrix_turned(shared_address(ring, start + found))
    found = place(at + (lane & 7), k0 >> 3, across)
    return ldmatrix(shared_address(ring, start + found))


@device
def mma(a: Any, b0: Any, b1: Any, sums: Any, brain: Any) -> Any:
    """Return 16 x 8 sums with the products of two fragments added."""
    a0, a1, a2, a3 = a
    c0, c1, c2, c3 = sums
    if brain:
        return mma_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
    return mma_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)


@device
def keep(held: Any, row: Any, column: Any, sums: Any) -> Any:
    """Write 16 x 8 sums to shared memory."""
    lane = cuda.threadIdx.x & 31
    at = (row + (lane >> 2)) * PITCH + column + 2 * (lane & 3)
    held[at], held[at + 1] = sums[0], sums[1]
    held[at + 8 * PITCH], held[at + 8 * PITCH + 1] = sums[2], sums[3]


@device
def tile(
    ring: Any, held: Any, a: Any, b: Any, c: Any, bias: Any, up: Any, residual: Any,
    m: Any, n: Any, k: Any, a_step: Any, b_step: Any, flags: Any,
    a_across: Any, b_across: Any, brain: Any,
) -> Any:  # fmt: skip
    """C = epilogue(op(A) op(B)) of one tile; the last three are constants."""
    zero = constant(0, c)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = (zero, zero, zero, zero)
    batch, first_row, first_column = tile_of(cuda.blockIdx.x, m, n, TILE, TILE)
    a_base, b_base = batch * a_step, batch * b_step
    a_plain, b_plain = flags & PLAIN_A != 0, flags & PLAIN_B != 0
    warp = cuda.threadIdx.x >> 5
    row, column = (warp >> 1) * 32, (warp & 1) * 32
    for i in range(STAGES - 1):
        left, right, k0 = 2 * i * SLICE, (2 * i + 1) * SLICE, i * STEP
        fetch(ring, left, a, a_base, first_row, k0, m, k, a_across, a_plain)
        fetch(ring, right, b, b_base, first_column, k0, n, k, b_across, b_plain)
        commit_copies()
    now, later = 0, STAGES - 1
    for k0 in range(0, k, STEP):
        wait_copies()
        cuda.syncthreads()
        ahead = k0 + (STAGES - 1) * STEP
        if ahead < k:
            left, right = 2 * later * SLICE, (2 * later + 1) * SLICE
            fetch(ring, left, a, a_base, first_row, ahead, m, k, a_across, a_plain)
            fetch(ring, right, b, b_base, first_column, ahead, n, k, b_across, b_plain)
        commit_copies()
        left, right = 2 * now * SLICE, (2 * now + 1) * SLICE
        for along in range(0, STEP, 16):
            a0 = words(ring, left, row, along, a_across, 3, 4)
            a1 = words(ring, left, row + 16, along, a_across, 3, 4)
            b0, b1, b2, b3 = words(ring, right, column, along, b_across, 4, 3)
            b4, b5, b6, b7 = words(ring, right, column + 16, along, b_across, 4, 3)
            s00 = mma(a0, b0, b1, s00, brain)
            s01 = mma(a0, b2, b3, s01, brain)
            s02 = mma(a0, b4, b5, s02, brain)
            s03 = mma(a0, b6, b7, s03, brain)
            s10 = mma(a1, b0, b1, s10, brain)
            s11 = mma(a1, b2, b3, s11, brain)
            s12 = mma(a1, b4, b5, s12, brain)
            s13 = mma(a1, b6, b7, s13, brain)
        now = 0 if now == STAGES - 1 else now + 1
        later = 0 if later == STAGES - 1 else later + 1
    keep(held, row, column, s00)
    keep(held, row, column + 8, s01)
    keep(held, row, column + 16, s02)
    keep(held, row, column + 24, s03)
    keep(held, row + 16, column, s10)
    keep(held, row + 16, column + 8, s11)
    keep(held, row + 16, column + 16, s12)
    keep(held, row + 16, column + 24, s13)
    cuda.syncthreads()
    for e in range(cuda.threadIdx.x, TILE * TILE, THREADS):
        y, x = e // TILE, e % TILE
        v = held[y * PITCH + x]
        finish(v, c, bias, up, residual, batch, first_row + y, first_column + x, m, n, flags)


def _kernel(a_across: bool, b_across: bool, name: str) -> Kernel:
    """Make the kernel for one layout of A and B and one number type."""
    brain = name == "bfloat16"
    kind = "uint16" if brain else "float16"

    def product(a, b, c, bias, up, residual, m, n, k, a_step, b_step, flags):  # type: ignore[no-untyped-def]
        ring = cuda.shared.array(RING, kind)
        held = cuda.shared.array(SUMS, "float32")
        tile(
            ring, held, a, b, c, bias, up, residual, m, n, k, a_step, b_step, flags,
            a_across, b_across, brain,
        )  # fmt: skip

    product.__name__ = "mma_" + "nt"[a_across] + "tn"[b_across]
    return kernel(TAKES, dtypes=(name,), threads=THREADS)(product)


PRODUCTS = {
    (bool(layout & 2), bool(layout & 1), name): _kernel(bool(layout & 2), bool(layout & 1), name)
    for layout in range(4)
    for name in ("float16", "bfloat16")
}
KERNELS = list(PRODUCTS.values())


def product_mma(
    a: Array, b: Array, c: Array, m: int, n: int, k: int, flags: int = 0, *,
    batch: int = 1, a_step: int = 0, b_step: int = 0,
    bias: Array | None = None, up: Array | None = None, residual: Array | None = None,
) -> None:  # fmt: skip
    """Write c = epilogue(op(a) op(b)), `batch` products of one shape and 16-bit number type.

    a: [m, k], or [k, m] with TRANSPOSE_A; b: [k, n], or [n, k] with TRANSPOSE_B; c: [m, n], all
    contiguous; a_step, b_step: elements from one matrix of a batch to the next; flags and the rest
    are those of epilogue.py.
    """
    a_across, b_across = bool(flags & TRANSPOSE_A), not flags & TRANSPOSE_B
    flags |= 0 if begins_at_16(a, m if a_across else k, a_step) else PLAIN_A
    flags |= 0 if begins_at_16(b, n if b_across else k, b_step) else PLAIN_B
    grid = batch * blocks(m, TILE) * blocks(n, TILE)
    rest = (a if one is None else one for one in (bias, up, residual))
    run = PRODUCTS[a_across, b_across, c.dtype.name]
    run(grid, THREADS, a, b, c, *rest, m, n, k, a_step, b_step, flags)


def begins_at_16(x: Array, row: int, step: int) -> bool:
    """Say whether all rows of matrices begin at multiples of 16 bytes."""
    pointer = int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)
    return not (row % PIECE or step % PIECE or pointer % 16)
