"""Recursive doubling: exchange with the partner at distance 1, 2, 4, ..., and have it all.

Thakur, Rabenseifner, Gropp 2005, sections 4.1 and 4.5.  all_reduce of the whole vector on 4 ranks:

    rank    0         1         2         3
            x0        x1        x2        x3
            x0+x1     x0+x1     x2+x3     x2+x3         0-1, 2-3
            all       all       all       all           0-2, 1-3

Other counts fold in and out (see `folding`), two rounds more.  Partners stand for neighbouring runs
of ranks, so sums keep rank order.

Cost for n bytes: all_reduce log2 p (alpha + n beta), good for small n; all_gather log2 p alpha +
(p-1)/p n beta.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import exclusive_or, folded
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.folding import fold
from mpipar.schedule.registry import one, per_rank, register


@register(
    "all_reduce",
    "recursive_doubling",
    "whole vectors exchanged at distance 1, 2, 4, ... (Thakur et al. 2005)",
    chunks=one,
    ordered=True,
    symmetry=folded,
)
def all_reduce(p: int, rank: int) -> Iterator[Round]:
    """Yield log2 p rounds for a power of two; else two more on the ranks that fold."""
    folding = fold(p)
    partner, position = folding.partner(rank), folding.position(rank)
    if folding.folded(rank):
        yield (Send(rank - 1, 0),)
        yield (Recv(rank - 1, 0),)
        return
    if partner is not None:
        yield (RecvReduce(partner, 0),)
    distance = 1
    while distance < folding.size:
        peer = folding.rank(position ^ distance)
        yield Send(peer, 0), RecvReduce(peer, 0)
        distance *= 2
    if partner is not None:
        yield (Send(partner, 0),)


@register(
    "all_gather",
    "recursive_doubling",
    "what is held so far exchanged at distance 1, 2, 4, ... (Thakur et al. 2005)",
    chunks=per_rank,
    symmetry=exclusive_or,
)
def all_gather(p: int, rank: int) -> Iterator[Round]:
    """Yield log2 p rounds for a power of two; else two more on the ranks that fold."""
    folding = fold(p)
    partner, position = folding.partner(rank), folding.position(rank)
    if folding.folded(rank):
        yield (Send(rank - 1, rank),)
        yield tuple(Recv(rank - 1, chunk) for chunk in range(p) if chunk != rank)
        return
    if partner is not None:
        yield (Recv(partner, partner),)
    distance = 1
    while distance < folding.size:
        first = position & -distance  # the positions first .. first + distance - 1 are held
        peer = folding.rank(position ^ distance)
        held = folding.ranks(first, distance)
        wanted = folding.ranks(first ^ distance, distance)
        yield (*(Send(peer, chunk) for chunk in held), *(Recv(peer, chunk) for chunk in wanted))
        distance *= 2
    if partner is not None:
        yield tuple(Send(partner, chunk) for chunk in range(p) if chunk != partner)
