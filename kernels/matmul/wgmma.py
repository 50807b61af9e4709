"""The product on Hopper's tensor cores (sm_90a), for bfloat16 and float16: sums in float32.

A block of two warpgroups computes 128 x `width` elements of C, a warpgroup 64 of its rows, whose
sums stay in width / 2 registers a thread.  In steps of 64 along k, slices of op(A) and op(B) come
by asynchronous copies of 16 bytes into a ring of 4 in shared memory:

    step i      the slices of step i have landed, in all threads: barrier
                start its products: they run after those of step i - 1, which go on meanwhile
                start the copies for step i + 2, over the slices of step i - 2: both warpgroups
                have finished those products, as they waited for them before the barrier
                wait for the products of step i - 1

So tensor cores always have products to go on with, and copies two steps of time to land.

A slice lies in rows of 128 bytes, swizzled, as ptx_wgmma.py says; one whose rows run across k in
blocks of 64 elements of m or n, each [64 of k][64]:   piece c of row r at  c ^ (r % 8)

Why copies of 16 bytes and barriers of the block, not the copy engine (TMA) and mbarriers: they fill
edges with zeros and swizzle by arithmetic that the simulator runs; tensor maps are made by the
driver, which CuPy does not pass on, and bulk copies without one do not swizzle.
"""

import functools
from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.kernels.device import Kernel, blocks, cuda, device, kernel
from mpipar.kernels.matmul.eight import finish8
from mpipar.kernels.matmul.epilogue import TRANSPOSE_A, TRANSPOSE_B, finish, tile_of
from mpipar.kernels.matmul.mma import TAKES, begins_at_16
from mpipar.kernels.ptx import address, shared_address
from mpipar.kernels.ptx_mma import commit_copies, copy16, wait_copies
from mpipar.kernels.ptx_wgmma import (
    begin_products,
    commit_products,
    fence_shared,
    finished,
    keep,
    number,
    wait_products,
    wgmma,
    zeros,
)

TALL, WIDTH, STEP, PIECE = 128, 256, 64, 8
ROW = 64  # elements of a row of 128 bytes
BLOCK = ROW * STEP  # a block of 64 x 64, and what a warpgroup multiplies of A
STAGES = 4
THREADS = 256
CAPABILITY = "90"  # of the devices that have these instructions: later ones do not
ENOUGH = 66  # tiles from which "auto" takes this: one for half of an H100's multiprocessors
EIGHT = 1 << 8  # of flags: C and what follows the product can be read 16 bytes at a time
# parts of descriptors, in 16 bytes: from 8 rows to the next; swizzled; from block to block
FORM = (1 << 62) | (8 * ROW * 2 // 16 << 32)
LEADING = 2 * BLOCK // 16 << 16


@device
def place(row: Any, piece: Any) -> Any:
    """Return where a slice has a piece, which is in block piece / 8: its first element."""
    return (piece >> 3) * BLOCK + row * ROW + ((piece ^ row) & 7) * PIECE


@device
def descriptor(start: Any, across: Any) -> Any:
    """Return the descriptor of an operand that begins at this address."""
    found = ((start & 0x3FFFF) >> 4) | FORM
    if across:
        found |= LEADING
    return found


@device
def further(across: Any) -> Any:
    """Return what 16 along k add to a descriptor: 16 rows, or 16 elements of each row."""
    return 2 * 16 * ROW // 16 if across else 2 * 16 // 16


@device
def fetch(
    ring: Any, start: Any, x: Any, base: Any, first: Any, k0: Any, size: Any, k: Any,
    bits: Any, count: Any, across: Any,
) -> Any:  # fmt: skip
    """Start to copy a slice of [size, k], or of [k, size] if `across`; zeros where it ends.

    A row of the slice has 2^bits pieces; a thread copies `count`, all in one column of pieces.
    """
    t = cuda.threadIdx.x
    row, piece, lines = t >> bits, t & ((1 << bits) - 1), THREADS >> bits
    target = start + place(row, piece)
    if across:
        rows, columns, row0, column = k, size, k0 + row, first + piece * PIECE
    else:
        rows, columns, row0, column = size, k, first + row, k0 + piece * PIECE
    left = rows - row0 if column < columns else 0
    source, gap = base + row0 * columns + column, lines * columns
    for i in range(count):
        inside = i * lines < left
        there = shared_address(ring, target + i * lines * ROW)
        copy16(there, address(x, source if inside else base), np.int32(16 if inside else 0))
        source += gap


@functools.cache
def make(width: int, a_across: bool, b_across: bool, name: str) -> Kernel:
    """Make the kernel for tiles of 128 x width, one layout of A and B, and one number type."""
    brain = name == "bfloat16"
    kind = np.dtype(np.uint16 if brain else np.float16)
    wide = np.dtype(np.float32)
    slice_a, slice_b, pitch = TALL * STEP, width * STEP, width + 8
    both = slice_a + slice_b
    a_count, b_count = slice_a // PIECE // THREADS, slice_b // PIECE // THREADS
    a_bits = 4 if a_across else 3
    b_bits = (width // PIECE).bit_length() - 1 if b_across else 3
    multiply, nothing = wgmma(width, name, a_across, b_across), zeros(width)
    finish_products, write = finished(width), keep(width, pitch)

    def product(a, b, c, bias, up, residual, m, n, k, a_step, b_step, flags):  # type: ignore[no-untyped-def]
        ring = cuda.shared.array(0, kind)
        held = cuda.shared.array(0, wide)  # the same memory, when the products are done
        t = cuda.threadIdx.x
        batch, row, column = tile_of(cuda.blockIdx.x, m, n, TALL, width)
        a_base, b_base = batch * a_step, batch * b_step
        origin = number(shared_address(ring, 0))
        left = descriptor(origin + (t >> 7) * 2 * BLOCK, a_across)
        right = descriptor(origin + 2 * slice_a, b_across)
        a_more, b_more = further(a_across), further(b_across)
        sums = nothing()
        for i in range(STAGES - 2):
            start, k0 = i * both, i * STEP
            if k0 < k:  # no copies that nobody waits for: the sums take their place
                fetch(ring, start, a, a_base, row, k0, m, k, a_bits, a_count, a_across)
                start += slice_a
                fetch(ring, start, b, b_base, column, k0, n, k, b_bits, b_count, b_across)
            commit_copies()
        now, later = 0, STAGES - 2
        for k0 in range(0, k, STEP):
            wait_copies()
            fence_shared()
            cuda.syncthreads()
            to_a, to_b = left + now * both // 8, right + now * both // 8
            begin_products()
            sums = multiply(sums, to_a, to_b)
            sums = multiply(sums, to_a + a_more, to_b + b_more)
            sums = multiply(sums, to_a + 2 * a_more, to_b + 2 * b_more)
            sums = multiply(sums, to_a + 3 * a_more, to_b + 3 * b_more)
            commit_products()
            ahead = k0 + (STAGES - 2) * STEP
            if ahead < k:
                start = later * both
                fetch(ring, start, a, a_base, row, ahead, m, k, a_bits, a_count, a_across)
                start += slice_a
                fetch(ring, start, b, b_base, column, ahead, n, k, b_bits, b_count, b_across)
            commit_copies()
            wait_products()
            now = 0 if now == STAGES - 1 else now + 1
            later = 0 if later == STAGES - 1 else later + 1
        sums = finish_products(sums)
        cuda.syncthreads()
        write(shared_address(held, (16 * (t >> 5) + (t >> 2 & 7)) * pitch + 2 * (t & 3)), sums)
        cuda.syncthreads()
        if flags & EIGHT:
            for e in range(t, TALL * width // 8, THREADS):
                y, x = e // (width // 8), e % (width // 8) * 8
                finish8(
                    held, y * pitch + x, c, bias, up, residual, batch, row + y, column + x, m, n,
                    flags, brain,
                )  # fmt: skip
        else:
            for e in range(t, TALL * width, THREADS):
                y, x = e // width, e % width
                v = held[y * pitch + x]
                finish(v, c, bias, up, residual, batch, row + y, column + x, m, n, flags)

    product.__name__ = f"wgmma_{width}_" + "nt"[a_across] + "tn"[b_across]
    shared = 2 * STAGES * both
    made = kernel(TAKES, dtypes=(name,), threads=THREADS, target="90a", shared=shared)
    return made(product)


KERNELS = [
    make(WIDTH, a_across, b_across, name)
    for a_across in (False, True)
    for b_across in (False, True)
    for name in ("float16", "bfloat16")
]


def fits(
    a: Array, b: Array, m: int, n: int, k: int, flags: int, *, a_step: int = 0, b_step: int = 0
) -> bool:
    """Say whether all rows of A and of B begin at 16 bytes: else mma.py multiplies them."""
    a_across, b_across = bool(flags & TRANSPOSE_A), not flags & TRANSPOSE_B
    left = begins_at_16(a, m if a_across else k, a_step)
    return left and begins_at_16(b, n if b_across else k, b_step)


def pays(batch: int, m: int, n: int) -> bool:
    """Say whether there are tiles for enough multiprocessors, at least half full."""
    tiles = batch * blocks(m, TALL) * blocks(n, WIDTH)
    return tiles >= ENOUGH and tiles * TALL * WIDTH <= 2 * batch * m * n


def product_wgmma(
    a: Array, b: Array, c: Array, m: int, n: int, k: int, flags: int = 0, *,
    batch: int = 1, a_step: int = 0, b_step: int = 0, width: int = WIDTH,
    bias: Array | None = None, up: Array | None = None, residual: Array | None = None,
) -> None:  # fmt: skip
    """Write c = epilogue(op(a) op(b)) of operands that fit; arguments are those of product_mma."""
    after = [a if one is None else one for one in (bias, up, residual)]
    if all(begins_at_16(x, n, 0) for x in (c, bias, up, residual) if x is not None):
        flags |= EIGHT
    grid = batch * blocks(m, TALL) * blocks(n, width)
    run = make(width, bool(flags & TRANSPOSE_A), not flags & TRANSPOSE_B, c.dtype.name)
    run(grid, THREADS, a, b, c, *after, m, n, k, a_step, b_step, flags)
