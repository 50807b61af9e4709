"""Dissemination barrier: in round k every rank tells rank + 2^k who has arrived so far.

Hensgen, Finkel, Manber, Int. J. Parallel Program. 17 (1988).

    4 ranks    round 1: 0>1 1>2 2>3 3>0    round 2: 0>2 1>3 2>0 3>1

After ceil(log2 p) rounds every rank knows that all have arrived.  Chunk i stands for "rank i has
arrived"; it has no bytes, a message is its own news.  Cost: (ceil log2 p) alpha.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import rotation
from mpipar.schedule.core import Recv, Round, Send
from mpipar.schedule.registry import per_rank, register


@register(
    "barrier",
    "dissemination",
    "round k: news to rank + 2^k (Hensgen, Finkel, Manber 1988)",
    chunks=per_rank,
    symmetry=rotation,
)
def barrier(p: int, rank: int) -> Iterator[Round]:
    """Yield ceil(log2 p) rounds; before round k a rank knows of itself and the 2^k - 1 behind."""
    distance = 1
    while distance < p:
        to, source = (rank + distance) % p, (rank - distance) % p
        count = min(distance, p - distance)
        news = [Send(to, (rank - i) % p) for i in range(count)]
        yield (*news, *(Recv(source, (source - i) % p) for i in range(count)))
        distance *= 2
