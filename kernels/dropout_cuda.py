"""Which elements dropout keeps, on a GPU: the random bits of mpipar.rng, bit for bit."""

import numpy as np

from mpipar.arrays import Array, module
from mpipar.kernels.device import THREADS, device, kernel
from mpipar.kernels.fours import elementwise, mine, put, take
from mpipar.rng import FIRST, GOLDEN, SECOND

S30, S27, S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@device
def bit(at, key, limit):  # type: ignore[no-untyped-def]
    """Return 1 where bits(key, at) >= limit (SplitMix64 in counter mode)."""
    z = np.uint64(at) * GOLDEN + key
    z = (z ^ (z >> S30)) * FIRST
    z = (z ^ (z >> S27)) * SECOND
    return np.uint8((z ^ (z >> S31)) >= limit)


@kernel(
    "uint8[], uint64[], int32, uint64, uint64, int32, int64", dtypes=("uint64",), threads=THREADS
)
def keep(kept, index, has_index, key, limit, wide, n):  # type: ignore[no-untyped-def]
    """Write which elements are kept."""
    i = mine()
    a, b, c, d = np.uint64(i), np.uint64(i + 1), np.uint64(i + 2), np.uint64(i + 3)
    if has_index:
        a, b, c, d = take(index, i, n, wide, a)
    bits = bit(a, key, limit), bit(b, key, limit), bit(c, key, limit), bit(d, key, limit)
    put(kept, i, n, wide, bits[0], bits[1], bits[2], bits[3])


def keep_cuda(shape: tuple[int, ...], p: float, key: int, index: Array | None) -> Array:
    """Return booleans: which elements are kept; index: on the device or the host."""
    xp = module("cuda")
    kept, limit = xp.empty(shape, np.bool_), min(int(p * 2.0**64), 2**64 - 1)
    some = xp.empty(0, np.uint64)
    if index is not None:
        some = xp.ascontiguousarray(xp.broadcast_to(xp.asarray(index, np.uint64), shape))
    bits = kept.view(np.uint8)
    elementwise(keep, bits, some, int(index is not None), key, limit, dtype="uint64")
    return kept
