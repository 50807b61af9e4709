"""Recursive halving: exchange half of what is left with the partner at distance 1, 2, 4, ...

Thakur, Rabenseifner, Gropp 2005, section 4.4.  The blocks left to rank 0 of 4:

    blocks 0 1 2 3     sends 1 3 to rank 1, adds rank 1's 0 2
           0   2       sends 2 to rank 2, adds rank 2's 0
           0

The textbook starts with the largest distance, so that halves are in one piece, but then rank 0
meets rank p/2 first.  Here distances grow: the sums that meet stand for neighbouring runs of ranks,
so rank order is kept; what a rank sends is every second, fourth, ... block.  Other counts fold in
and out (see `folding`), two rounds more.

Cost for n bytes: log2 p alpha + (p-1)/p n beta for a power of two; else n and n/p bytes more on the
ranks that fold.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import exclusive_or
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.folding import Folding, fold
from mpipar.schedule.registry import per_rank, register


@register(
    "reduce_scatter",
    "recursive_halving",
    "half of what is left exchanged at distance 1, 2, 4, ... (Thakur et al. 2005)",
    chunks=per_rank,
    ordered=True,
    symmetry=exclusive_or,
)
def reduce_scatter(p: int, rank: int) -> Iterator[Round]:
    """Yield log2 p rounds for a power of two; else two more on the ranks that fold."""
    folding = fold(p)
    partner, position = folding.partner(rank), folding.position(rank)
    if folding.folded(rank):
        yield tuple(Send(rank - 1, chunk) for chunk in range(p))
        yield (Recv(rank - 1, rank),)
        return
    if partner is not None:
        yield tuple(RecvReduce(partner, chunk) for chunk in range(p))
    distance = 1
    while distance < folding.size:
        other = position ^ distance
        peer = folding.rank(other)
        given = _blocks(folding, other, 2 * distance)
        kept = _blocks(folding, position, 2 * distance)
        yield (
            *(Send(peer, chunk) for chunk in given),
            *(RecvReduce(peer, chunk) for chunk in kept),
        )
        distance *= 2
    if partner is not None:
        yield (Send(partner, partner),)


def _blocks(folding: Folding, position: int, stride: int) -> list[int]:
    """Return the blocks of all positions that equal `position` modulo `stride`."""
    positions = range(position % stride, folding.size, stride)
    return [block for other in positions for block in folding.ranks(other)]
