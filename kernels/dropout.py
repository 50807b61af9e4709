"""y_i = x_i / (1 - p) where kept, else 0; kept if bits(key, index_i) >= p * 2^64.

Srivastava et al. (2014); the random bits are counter-based (see mpipar.rng), so a shard keeps
exactly the elements that the whole array would keep.
"""

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, is_device, module_of
from mpipar.kernels.blocks import BLOCK_BYTES, host
from mpipar.kernels.dropout_cuda import keep_cuda
from mpipar.kernels.native import Bytes, Floats, Ints, compile_cpu, loop, usable
from mpipar.rng import FIRST, GOLDEN, SECOND


def reference(p: float, key: int, index: np.ndarray) -> np.ndarray:
    """Return which elements are kept: uniform numbers of at least p."""
    return (rng.bits(key, index) * 2.0**-64 >= p).reshape(index.shape)


def keep_cpu(shape: tuple[int, ...], p: float, key: int, index: np.ndarray | None) -> np.ndarray:
    """Return booleans: which elements are kept."""
    kept = np.empty(shape, bool)
    flat, limit = kept.reshape(-1), np.uint64(min(int(p * 2.0**64), 2**64 - 1))
    as_int64 = np.array([key, limit], np.uint64).view(np.int64).tolist()
    counters = None if index is None else np.broadcast_to(index, shape).reshape(-1)
    step, compiled = BLOCK_BYTES // 8, compile_cpu()
    for start in range(0, flat.size, step):
        stop = min(start + step, flat.size)
        if counters is None:
            block = np.arange(start, stop, dtype=np.uint64)
        else:
            block = counters[start:stop].astype(np.uint64, copy=False)
        if compiled:
            bits = flat[start:stop].view(np.uint8)
            keep_loop(block.view(np.int64), bits, len(block), *as_int64)
        else:
            np.greater_equal(rng.bits(key, block), limit, out=flat[start:stop])
    return kept


@loop
def keep_loop(index: Ints, kept: Bytes, n: int, key: int, limit: int) -> None:
    """Do the same for n indices: `rng.bits`, and whether they reach the limit."""
    for i in range(n):
        z = np.uint64(index[i]) * GOLDEN + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * FIRST
        z = (z ^ (z >> np.uint64(27))) * SECOND
        kept[i] = np.uint8(z ^ (z >> np.uint64(31)) >= np.uint64(limit))


def scale(x: Array, kept: Array, factor: float) -> Array:
    """Return x times a factor where it is kept, else 0, as a new array."""
    if usable(x) and kept.flags.c_contiguous:
        out = np.empty(x.shape, x.dtype)
        scale_loop(x, kept.view(np.uint8), out, x.size, factor)
        return out
    out = module_of(x).asarray(np.multiply(x, kept))  # an array for 0 dimensions too
    return np.multiply(out, module_of(x).asarray(factor, out.dtype), out=out)


@loop
def scale_loop(x: Floats, kept: Bytes, out: Floats, n: int, factor: float) -> None:
    """Do the same for n elements; what is not finite and not kept is NaN, as with a product."""
    for i in range(n):
        out[i] = x[i] * np.float32(kept[i]) * factor


def keep(
    shape: tuple[int, ...], p: float, key: int, index: Array | None = None, like: Array = None
) -> Array:
    """Return which elements are kept, each with probability 1 - p.

    index: the uint64 global index of each element, of (or broadcast to) `shape`; None: 0, 1, 2, ...
    like: an array where the result shall be.
    """
    if is_device(like):
        return keep_cuda(shape, p, key, index)
    host("dropout", index)
    return keep_cpu(shape, p, key, index)
