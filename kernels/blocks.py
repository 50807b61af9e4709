"""Row blocks that stay in the cache: what the CPU kernels share.

A kernel on rows (N, D) reads a block of rows, works on it in scratch of the same size, and writes
it, so that every element crosses the memory bus once in and once out.  16-bit rows are widened to
float32 block by block and rounded once when written.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_device, module_of
from mpipar.errors import BufferMismatchError, ConfigError, explain

BLOCK_BYTES = 1 << 18  # a block and two of scratch stay in a cache of 1 to 2 MiB


def matrix(x: np.ndarray) -> np.ndarray:
    """Return x (..., D) as rows (N, D): a view where the layout allows one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def flat(name: str, x: np.ndarray) -> np.ndarray:
    """Return x as a 1-D view, for a kernel that writes to it.

    Raises BufferMismatchError if x is not contiguous.
    """
    if not x.flags.c_contiguous:
        rule = f"an array that is updated in place is contiguous, not of strides {x.strides}"
        raise BufferMismatchError(
            explain(name, x.shape, rule, "Pass numpy.ascontiguousarray of it")
        )
    return x.reshape(-1)


def row_blocks(n: int, width: int, itemsize: int = 4) -> Iterator[slice]:
    """Yield slices of `n` rows of `width` elements, each about BLOCK_BYTES."""
    step = block_rows(width, itemsize)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def block_rows(width: int, itemsize: int = 4) -> int:
    """Return how many rows of `width` elements make a block."""
    return max(1, BLOCK_BYTES // max(width * itemsize, 1))


def scratch(n: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised block for rows of an (n, width) matrix."""
    return np.empty((min(block_rows(width, dtype.itemsize), n), width), dtype)


def place(out: np.ndarray, block: slice, space: np.ndarray) -> np.ndarray:
    """Return where a block of `out` is computed: in it, or in scratch if it is 16 bits wide."""
    return out[block] if out.dtype == space.dtype else space[: block.stop - block.start]


def store(out: np.ndarray, block: slice, y: np.ndarray) -> None:
    """Round what was computed in scratch into `out`; nothing to do if it is there already."""
    if out.dtype != y.dtype:
        out[block] = y


def element_blocks(n: int, itemsize: int = 4) -> Iterator[slice]:
    """Yield slices of `n` elements, each half of BLOCK_BYTES."""
    step = BLOCK_BYTES // itemsize // 2
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def element_scratch(count: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Return `count` uninitialised blocks for `n` elements."""
    return np.empty((count, min(BLOCK_BYTES // dtype.itemsize // 2, n)), dtype)


def widen(x: np.ndarray) -> np.ndarray:
    """Return x itself, or a float32 copy of 16-bit numbers."""
    return x.astype(compute_dtype(x.dtype), copy=False)


def row_sums(x: np.ndarray) -> np.ndarray:
    """Return the sum of each row of x (N, D): (N,), as a product with ones, which is fastest."""
    return x @ module_of(x).ones(x.shape[1], x.dtype)


def row_max(x: np.ndarray) -> np.ndarray:
    """Return the maximum of each row of x (..., D): (..., 1)."""
    if is_device(x):
        return x.max(axis=-1, keepdims=True)
    return np.maximum.reduce(x, axis=-1, keepdims=True)


def host(kernel: str, *operands: Any) -> None:
    """Raise ConfigError if an operand lives on a GPU: `kernel` has no CUDA version."""
    for x in operands:
        if is_device(x):
            raise ConfigError(
                explain(
                    "device",
                    "cuda",
                    f"the {kernel} kernel works on host arrays",
                    "Move the arrays with .get(), or train with --device cpu",
                )
            )


__all__ = [
    "Array",
    "block_rows",
    "element_blocks",
    "element_scratch",
    "flat",
    "host",
    "matrix",
    "place",
    "row_blocks",
    "row_max",
    "row_sums",
    "scratch",
    "store",
    "widen",
]
