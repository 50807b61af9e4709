"""Bruck's algorithms: distances double, so ceil(log2 p) rounds do for any number of ranks.

Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE Trans. Parallel Distrib. Syst. 8 (1997).

    all_gather on 4 ranks     holds        round 1, from 1 ahead   round 2, from 2 ahead
                    rank 0    0            0 1                     0 1 2 3
                    rank 1    1            1 2                     1 2 3 0

all_gather: (ceil log2 p) alpha + (p-1)/p n beta, where n bytes are gathered.

all_to_all: a block that has to go d ranks ahead makes one hop for every bit set in d.  Round k
moves all blocks whose bit k is set by 2^k ranks, about half of what a rank has:
(ceil log2 p) (alpha + n/2 beta), where n bytes are what one rank sends in all.  Good for small n.
Chunk ids are global, so the rotations of the paper's first and last phase are not needed.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import rotation
from mpipar.schedule.core import Recv, Round, Send
from mpipar.schedule.registry import per_pair, per_rank, register


@register(
    "all_gather",
    "bruck",
    "ceil(log2 p) rounds for any p (Bruck et al. 1997)",
    chunks=per_rank,
    symmetry=rotation,
)
def all_gather(p: int, rank: int) -> Iterator[Round]:
    """Yield ceil(log2 p) rounds; before round k a rank holds the 2^k chunks from its own on."""
    distance = 1
    while distance < p:
        ahead, behind = (rank + distance) % p, (rank - distance) % p
        count = min(distance, p - distance)
        sends = [Send(behind, (rank + i) % p) for i in range(count)]
        yield (*sends, *(Recv(ahead, (ahead + i) % p) for i in range(count)))
        distance *= 2


@register(
    "all_to_all",
    "bruck",
    "ceil(log2 p) rounds, blocks hop by powers of two (Bruck et al. 1997)",
    chunks=per_pair,
    symmetry=rotation,
)
def all_to_all(p: int, rank: int) -> Iterator[Round]:
    """Yield ceil(log2 p) rounds; round k moves the blocks with bit k in their distance."""
    hop = 1
    while hop < p:
        to, source = (rank + hop) % p, (rank - hop) % p
        far = [d for d in range(p) if d & hop]  # how far these blocks go in all
        sends = [Send(to, _block(p, rank, hop, d)) for d in far]
        yield (*sends, *(Recv(source, _block(p, source, hop, d)) for d in far))
        hop *= 2


def _block(p: int, rank: int, hop: int, d: int) -> int:
    """Return the chunk of distance d that lies on `rank` once its bits below `hop` are done."""
    origin = (rank - d % hop) % p
    return origin * p + (origin + d) % p
