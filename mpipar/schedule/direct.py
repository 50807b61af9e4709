"""Direct algorithms: everything goes from its source straight to where it is needed, in one round.

    reduce_scatter on 4 ranks, what rank 2 gets        all_gather, what rank 2 sends

        0 --+                                              +--> 0
        1 --+--> 2   x0 + x1 + x2 + x3                 2 --+--> 1
        3 --+                                              +--> 3

All p operands of a block meet at its owner in one round, where they are added from rank 0 to rank
p-1, one after the other.  This is what makes a sum the same bits on every rank in every run, and
what lets 16-bit values be added in float32 and rounded once.

Cost for n bytes: reduce_scatter, all_gather and all_to_all (p-1) alpha + (p-1)/p n beta with all
messages in flight at once; all_reduce twice that.  No data travels twice, but a rank has p-1
messages open and needs room for p-1 received blocks.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import rotation
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import per_pair, per_rank, register


def _others(p: int, rank: int) -> list[int]:
    """Return the other ranks, from the next one round, so that not all start with rank 0."""
    return [(rank + step) % p for step in range(1, p)]


@register(
    "reduce_scatter",
    "direct",
    "every block straight to its owner, added from rank 0 to p-1 in one round",
    chunks=per_rank,
    ordered=True,
    symmetry=rotation,
)
def reduce_scatter(p: int, rank: int) -> Iterator[Round]:
    """Yield one round: chunk j to rank j; own chunk from all."""
    if p > 1:
        others = _others(p, rank)
        yield (*(Send(j, j) for j in others), *(RecvReduce(j, rank) for j in others))


@register(
    "all_gather",
    "direct",
    "every block straight to all, in one round",
    chunks=per_rank,
    symmetry=rotation,
)
def all_gather(p: int, rank: int) -> Iterator[Round]:
    """Yield one round: own chunk to all; chunk j from rank j."""
    if p > 1:
        others = _others(p, rank)
        yield (*(Send(j, rank) for j in others), *(Recv(j, j) for j in others))


@register(
    "all_reduce",
    "direct",
    "direct reduce_scatter, then direct all_gather: the sum x0 + x1 + ... in rank order",
    chunks=per_rank,
    ordered=True,
    symmetry=rotation,
)
def all_reduce(p: int, rank: int) -> Iterator[Round]:
    """Yield two rounds: the reduce_scatter's, then the all_gather's."""
    yield from reduce_scatter(p, rank)
    yield from all_gather(p, rank)


@register(
    "all_to_all",
    "direct",
    "every block straight to its rank, in one round",
    chunks=per_pair,
    symmetry=rotation,
)
def all_to_all(p: int, rank: int) -> Iterator[Round]:
    """Yield one round: chunk rank*p + j to rank j; chunk j*p + rank from rank j."""
    if p > 1:
        others = _others(p, rank)
        sends = [Send(j, rank * p + j) for j in others]
        yield (*sends, *(Recv(j, j * p + rank) for j in others))
