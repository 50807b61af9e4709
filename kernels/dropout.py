"""y_i = x_i / (1 - p) where kept, else 0; kept if bits(key, index_i) >= p * 2^64.

Srivastava et al. (2014); the random bits are counter-based (see mpipar.rng), so a shard keeps
exactly the elements that the whole array would keep.
"""

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, is_device
from mpipar.kernels.blocks import BLOCK_BYTES, host
from mpipar.kernels.dropout_cuda import keep_cuda


def reference(p: float, key: int, index: np.ndarray) -> np.ndarray:
    """Return which elements are kept: uniform numbers of at least p."""
    return (rng.bits(key, index) * 2.0**-64 >= p).reshape(index.shape)


def keep_cpu(shape: tuple[int, ...], p: float, key: int, index: np.ndarray | None) -> np.ndarray:
    """Return booleans: which elements are kept."""
    kept = np.empty(shape, bool)
    flat, limit = kept.reshape(-1), np.uint64(min(int(p * 2.0**64), 2**64 - 1))
    counters = None if index is None else np.broadcast_to(index, shape).reshape(-1)
    step = BLOCK_BYTES // 8
    for start in range(0, flat.size, step):
        stop = min(start + step, flat.size)
        block = (
            np.arange(start, stop, dtype=np.uint64) if counters is None else counters[start:stop]
        )
        np.greater_equal(rng.bits(key, block), limit, out=flat[start:stop])
    return kept


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
