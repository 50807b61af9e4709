"""Pairwise exchange: in round s every rank sends to rank + s and receives from rank - s.

    4 ranks    round 1: 0>1 1>2 2>3 3>0    round 2: 0>2 1>3 2>0 3>1    round 3: 0>3 1>0 2>1 3>2

Every round is a permutation of the ranks: each rank has one message going out and one coming in,
so links are not crowded, and one received block is all the room a rank needs
(Thakur, Rabenseifner, Gropp 2005, sections 4.3 and 4.4).

Cost for n bytes: (p-1) (alpha + n/p beta).  A reduce_scatter adds in the order r, r-1, r-2, ...,
which is not rank order.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import rotation
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import per_pair, per_rank, register


@register(
    "reduce_scatter",
    "pairwise",
    "round s: to rank + s, from rank - s (Thakur, Rabenseifner, Gropp 2005)",
    chunks=per_rank,
    symmetry=rotation,
)
def reduce_scatter(p: int, rank: int) -> Iterator[Round]:
    """Yield p-1 rounds: a chunk straight to its owner, own chunk from one rank after the other."""
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        yield Send(to, to), RecvReduce(source, rank)


@register(
    "all_to_all",
    "pairwise",
    "round s: to rank + s, from rank - s (Thakur, Rabenseifner, Gropp 2005)",
    chunks=per_pair,
    symmetry=rotation,
)
def all_to_all(p: int, rank: int) -> Iterator[Round]:
    """Yield p-1 rounds: chunk rank*p + j to rank j; chunk j*p + rank from rank j."""
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        yield Send(to, rank * p + to), Recv(source, source * p + rank)
