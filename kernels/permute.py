"""out[i, j, k, ...] = x[i, j, k, ...] for any strides of both: every change of layout is this copy.

    permutation     a new array = x.transpose(axes)           [batch, seq, heads, dim] packed for
    gather          a block of an array = a piece             an all-to-all: (0, 2, 1, 3)
    scatter         a piece = a block of an array

On a GPU neighbouring dimensions are first joined where both strides allow it.  Then either both
arrays run along the same dimension, and rows are copied, 16 bytes at a time where they are aligned;
or they run along two, and 32 x 32 tiles are turned in shared memory, so that both sides read and
write whole lines.  Cost: each byte read and written once.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels.device import blocks, cuda, device, kernel
from mpipar.kernels.fours import pointer
from mpipar.kernels.ptx import address, load4, store4

THREADS = 256
EACH = 4  # rows that a thread copies: their places follow from the first one's by counting on
TILE, PITCH, LINES = 32, 33, 8
CELLS = TILE * PITCH
OUTER = 4  # dimensions besides that of the rows
WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
SIXTEEN = 16
PLACE = "int64, uint32, uint32, uint32, uint32, uint32, " + ", ".join(["int64"] * 8)


def reference(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the contiguous array with the axes in this order."""
    return np.ascontiguousarray(np.transpose(x, axes))


@device
def first_row(e, width, n1, n2, n3):  # type: ignore[no-untyped-def]
    """Return the first row of thread e, and its place in each dimension."""
    first = np.uint32(np.uint32(e // width) * np.uint32(EACH))
    c3, rest = np.int64(first % n3), np.uint32(first // n3)
    c2, rest = np.int64(rest % n2), np.uint32(rest // n2)
    c1, c0 = np.int64(rest % n1), np.int64(rest // n1)
    return np.int64(first), c0, c1, c2, c3


@device
def next_row(c0, c1, c2, c3, n1, n2, n3):  # type: ignore[no-untyped-def]
    """Return the place of the row after this one."""
    c3 += 1
    if c3 == n3:
        c3, c2 = 0, c2 + 1
    if c2 == n2:
        c2, c1 = 0, c1 + 1
    if c1 == n1:
        c1, c0 = 0, c0 + 1
    return c0, c1, c2, c3


@kernel(f"T[], T[], {PLACE}", dtypes=tuple(WORDS.values()), threads=THREADS)
def rows(out, x, count, width, n0, n1, n2, n3, o0, o1, o2, o3, i0, i1, i2, i3):  # type: ignore[no-untyped-def]
    """Copy rows of `width` elements; count: of rows, the product of n0 to n3."""
    e = np.uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    column = np.int64(e % width)
    row, c0, c1, c2, c3 = first_row(e, width, n1, n2, n3)
    for _ in range(EACH):
        if row < count:
            out[c0 * o0 + c1 * o1 + c2 * o2 + c3 * o3 + column] = x[
                c0 * i0 + c1 * i1 + c2 * i2 + c3 * i3 + column
            ]
        row += 1
        c0, c1, c2, c3 = next_row(c0, c1, c2, c3, n1, n2, n3)


@kernel(f"T[], T[], {PLACE}", dtypes=("uint32",), threads=THREADS)
def rows16(out, x, count, width, n0, n1, n2, n3, o0, o1, o2, o3, i0, i1, i2, i3):  # type: ignore[no-untyped-def]
    """Do so, 16 bytes at a time: strides in words of four, width in pieces of 16 bytes."""
    e = np.uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    column = 4 * np.int64(e % width)
    row, c0, c1, c2, c3 = first_row(e, width, n1, n2, n3)
    for _ in range(EACH):
        if row < count:
            a, b, c, d = load4(address(x, c0 * i0 + c1 * i1 + c2 * i2 + c3 * i3 + column))
            store4(address(out, c0 * o0 + c1 * o1 + c2 * o2 + c3 * o3 + column), a, b, c, d)
        row += 1
        c0, c1, c2, c3 = next_row(c0, c1, c2, c3, n1, n2, n3)


def _turn(word: str) -> Any:
    """Make the kernel that turns tiles of words."""
    kind = np.dtype(word)

    def turn(out, x, down, across, n1, n2, o0, o1, o2, line, i0, i1, i2, column):  # type: ignore[no-untyped-def]
        # out runs along `across`, x along `down`; line, column: the strides of the other dimension
        tile = cuda.shared.array(CELLS, kind)
        t = cuda.threadIdx.x
        y, z = t // TILE, t % TILE
        high, wide = cuda.blockIdx.y * TILE, cuda.blockIdx.z * TILE
        c2 = cuda.blockIdx.x % n2
        c0, c1 = cuda.blockIdx.x // n2 // n1, cuda.blockIdx.x // n2 % n1
        source = c0 * i0 + c1 * i1 + c2 * i2
        target = c0 * o0 + c1 * o1 + c2 * o2
        for k in range(y, TILE, LINES):
            if high + z < down and wide + k < across:
                tile[k * PITCH + z] = x[source + high + z + (wide + k) * column]
        cuda.syncthreads()
        for k in range(y, TILE, LINES):
            if high + k < down and wide + z < across:
                out[target + (high + k) * line + wide + z] = tile[z * PITCH + k]

    takes = "T[], T[], " + ", ".join(["int64"] * 12)
    return kernel(takes, dtypes=(word,), threads=THREADS)(turn)


TURN = {word: _turn(word) for word in WORDS.values()}
KERNELS = list(TURN.values())


class Dim(NamedTuple):
    """A dimension: its size, and the strides of both arrays, in elements."""

    size: int
    out: int
    x: int


def permute(x: Array, axes: tuple[int, ...]) -> Array:
    """Return the contiguous array with the axes of x in this order."""
    turned = x.transpose(axes)
    out = module_of(x).empty(turned.shape, x.dtype)
    assign(out, turned)
    return out


def assign(out: Array, x: Array) -> None:
    """Copy x into out, arrays of one shape and dtype and any strides.

    Raises on a GPU BufferMismatchError for other shapes or dtypes, and ConfigError for more
    dimensions than its kernels take that cannot be joined.
    """
    if is_device(out):
        assign_cuda(out, x)
    else:
        out[...] = x


def assign_cuda(out: Array, x: Array) -> None:
    """Start the kernel that suits the strides."""
    if out.shape != x.shape or out.dtype != x.dtype:
        rule = f"it is copied to {out.dtype} {out.shape}"
        raise BufferMismatchError(explain("x", (x.dtype.name, x.shape), rule, "Convert it first"))
    if not out.size:
        return
    if min(*out.strides, *x.strides, 0) < 0:
        rule = "on a GPU an array is copied forwards"
        raise BufferMismatchError(explain("x.strides", x.strides, rule, "Copy it with CuPy first"))
    item = out.dtype.itemsize
    dims = joined(out.shape, [s // item for s in out.strides], [s // item for s in x.strides])
    inner = next((d for d in dims if d.out == 1 and d.x == 1), None)
    if inner is not None or not _turns(out, x, dims):
        _rows(out, x, [d for d in dims if d is not inner], 1 if inner is None else inner.size)


def _rows(out: Array, x: Array, dims: list[Dim], width: int) -> None:
    """Copy rows that both arrays run along."""
    outer = [Dim(1, 0, 0)] * (OUTER - len(dims)) + dims
    if len(outer) > OUTER:
        rule = f"at most {OUTER + 1} dimensions that cannot be joined are copied on a GPU"
        raise ConfigError(explain("x.shape", x.shape, rule, "Copy it in parts"))
    item, count = out.dtype.itemsize, prod(d.size for d in outer)
    if count * width >= 1 << 32:
        rule = "at most 2^32 elements are copied at once on a GPU"
        raise ConfigError(explain("x.shape", x.shape, rule, "Copy it in parts"))
    steps = [stride for d in dims for stride in (d.out, d.x)]
    wide = all(n * item % SIXTEEN == 0 for n in [width, *steps]) and aligned(out, x)
    word, unit = ("uint32", SIXTEEN) if wide else (WORDS[item], item)
    step = np.dtype(word).itemsize
    strides = [d.out * item // step for d in outer] + [d.x * item // step for d in outer]
    places = count, width * item // unit, *(d.size for d in outer), *strides
    grid = blocks(blocks(count, EACH) * (width * item // unit), THREADS)
    (rows16 if wide else rows)(grid, THREADS, _flat(out, word), _flat(x, word), *places)


def _turns(out: Array, x: Array, dims: list[Dim]) -> bool:
    """Turn tiles, if out and x run along two different dimensions; say whether they do."""
    across = next((d for d in dims if d.out == 1), None)
    down = next((d for d in dims if d.x == 1), None)
    others = [d for d in dims if d is not across and d is not down]
    if across is None or down is None or len(others) > 3:
        return False
    b0, b1, b2 = [Dim(1, 0, 0)] * (3 - len(others)) + others
    grid = (b0.size * b1.size * b2.size, blocks(down.size, TILE), blocks(across.size, TILE))
    word = WORDS[out.dtype.itemsize]
    sizes = (down.size, across.size, b1.size, b2.size)
    places = (b0.out, b1.out, b2.out, down.out, b0.x, b1.x, b2.x, across.x)
    TURN[word](grid, THREADS, _flat(out, word), _flat(x, word), *sizes, *places)
    return True


def joined(shape: tuple[int, ...], out: list[int], x: list[int]) -> list[Dim]:
    """Return the dimensions by falling stride of out, neighbours joined where both allow it."""
    dims = [Dim(*one) for one in zip(shape, out, x, strict=True) if one[0] > 1]
    found: list[Dim] = []
    for dim in sorted(dims, key=lambda d: (-d.out, -d.x)):
        last = found[-1] if found else None
        if last and last.out == dim.size * dim.out and last.x == dim.size * dim.x:
            found[-1] = Dim(last.size * dim.size, dim.out, dim.x)
        else:
            found.append(dim)
    return found


def _flat(a: Array, word: str) -> Array:
    """Return the memory that an array spans, as a 1-D array of words."""
    item = a.dtype.itemsize
    span = 1 + sum((n - 1) * stride // item for n, stride in zip(a.shape, a.strides, strict=True))
    strided = module_of(a).lib.stride_tricks.as_strided
    return strided(a, (span,), (item,)).view(word)


def aligned(*arrays: Array) -> bool:
    """Say whether all of them begin where 16 bytes can be read at once."""
    return all(pointer(a) % SIXTEEN == 0 for a in arrays)
