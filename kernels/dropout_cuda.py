"""Which elements dropout keeps, on a GPU: the random bits of mpipar.rng, bit for bit."""

import numpy as np

from mpipar.arrays import Array, module
from mpipar.kernels.device import FOUR, THREADS, blocks, cuda, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1, MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S30, S27, S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@kernel("uint8[], uint64[], int32, uint64, uint64, int64", dtypes=("uint64",), threads=THREADS)
def keep(kept, index, has_index, key, limit, n):  # type: ignore[no-untyped-def]
    """Write 1 where bits(key, index) >= limit (SplitMix64 in counter mode)."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            at = index[i] if has_index else np.uint64(i)
            z = at * GOLDEN + key
            z = (z ^ (z >> S30)) * MIX1
            z = (z ^ (z >> S27)) * MIX2
            kept[i] = (z ^ (z >> S31)) >= limit


def keep_cuda(shape: tuple[int, ...], p: float, key: int, index: Array | None) -> Array:
    """Return booleans: which elements are kept; index: on the device or the host."""
    xp = module("cuda")
    kept, limit = xp.empty(shape, np.bool_), min(int(p * 2.0**64), 2**64 - 1)
    some = xp.empty(0, np.uint64)
    if index is not None:
        some = xp.ascontiguousarray(xp.broadcast_to(xp.asarray(index, np.uint64), shape))
    bits = kept.view(np.uint8)
    settings = int(index is not None), key, limit, kept.size
    keep(blocks(kept.size, THREADS * FOUR), THREADS, bits, some, *settings, dtype="uint64")
    return kept
