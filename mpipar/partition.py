"""The only split arithmetic of the project: who holds which part of `n` elements.

    blocks(8, 3)         (3, 3, 2)          sizes as numpy.array_split's: the first n % p get 1 more
    offsets((3, 3, 2))   (0, 3, 6)          where each block starts
    padded_blocks(8, 3)  (3, 9)             equal size of every block, and the padded total
    zigzag(16, 2)        rank 0: 0..3 and 12..15; rank 1: 4..7 and 8..11

The zigzag layout gives rank r the blocks r and 2p-1-r of 2p blocks, so that under a causal mask
every rank has the same amount of work (Llama 3, section 3.3.2; Zhu's zigzag ring attention).
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from mpipar.errors import ConfigError, explain

SMALL = 10**6  # of a huge number only the divisors up to it are looked for, and their counterparts


def blocks(n: int, p: int) -> tuple[int, ...]:
    """Return the sizes of `p` blocks of `n` elements, as `numpy.array_split` cuts them.

    Raises ConfigError if n < 0 or p < 1.
    """
    if n < 0:
        raise ConfigError(explain("n", n, "it must not be negative", "Pass n >= 0"))
    if p < 1:
        raise ConfigError(explain("p", p, "there must be at least one block", "Pass p >= 1"))
    base, extra = divmod(n, p)
    return (base + 1,) * extra + (base,) * (p - extra)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the start of each block, given the sizes."""
    return tuple(accumulate(sizes, initial=0))[:-1]


def block(n: int, p: int, r: int) -> slice:
    """Return the slice of block `r` of `blocks(n, p)`, without building the others."""
    base, extra = divmod(n, p)
    start = r * base + min(r, extra)
    return slice(start, start + base + (r < extra))


def padded_blocks(n: int, p: int) -> tuple[int, int]:
    """Return (size, total): the size of each of `p` equal blocks, and p * size >= n."""
    size = -(-n // p)
    return size, size * p


def zigzag(n: int, p: int) -> tuple[tuple[slice, slice], ...]:
    """Return for each rank the two slices of `n` positions that it holds, in ascending order."""
    sizes = blocks(n, 2 * p)
    starts = offsets(sizes)
    cut = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tuple((cut[r], cut[2 * p - 1 - r]) for r in range(p))


def divisors(n: int) -> list[int]:
    """Return the numbers that divide n."""
    small = [d for d in range(1, min(math.isqrt(n), SMALL) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
