"""Arrays as blocks one behind the other: cutting along any dimension, and joining again.

A schedule moves blocks that are contiguous.  Along dimension 0 an array is that already, and
nothing is copied; along any other one its blocks are packed first, or unpacked afterwards.
"""

import math
from collections.abc import Sequence

import numpy as np

from mpipar.arrays import Array
from mpipar.comm.buffers import empty, flat
from mpipar.errors import BufferMismatchError, explain
from mpipar.kernels.permute import assign
from mpipar.partition import offsets


def axis(dim: int, ndim: int, parameter: str = "dim") -> int:
    """Return `dim` as 0 <= dim < ndim.  Raises BufferMismatchError if there is no such one."""
    whole = isinstance(dim, int | np.integer) and not isinstance(dim, bool)
    if not whole or not -ndim <= dim < ndim:
        rule = f"it must be one of the array's {ndim} dimensions"
        raise BufferMismatchError(explain(parameter, dim, rule, "Choose one of them"))
    return int(dim) % ndim


def with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Return the shape with another size along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def is_outermost(shape: Sequence[int], dim: int) -> bool:
    """Say whether blocks along `dim` are contiguous in memory."""
    return math.prod(shape[:dim]) == 1


def pack(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    """Return the blocks of `x` along `dim`, flat, one behind the other."""
    if is_outermost(x.shape, dim):
        return flat(x)
    packed = empty(x.size, x)
    rest = x.size // max(1, x.shape[dim])
    for start, size in zip(offsets(sizes), sizes, strict=True):
        block = packed[start * rest : (start + size) * rest]
        part = x[(slice(None),) * dim + (slice(start, start + size),)]
        assign(block.reshape(part.shape), part)
    return packed


def unpack(packed: Array, out: Array, dim: int, sizes: Sequence[int]) -> None:
    """Write the flat blocks to their places along `dim` of `out`."""
    rest = out.size // max(1, out.shape[dim])
    for start, size in zip(offsets(sizes), sizes, strict=True):
        part = out[(slice(None),) * dim + (slice(start, start + size),)]
        assign(part, packed[start * rest : (start + size) * rest].reshape(part.shape))
