"""Rabenseifner's all_reduce: halving reduce_scatter, then doubling all_gather.

Rabenseifner, ICCS 2004; Thakur, Rabenseifner, Gropp 2005, section 4.5.  What rank 0 of 4 holds of
the sum, and the partner of each round:

    chunks 0 1 2 3
           0 1         sends 2 3 to rank 1, adds rank 1's 0 1
           0           sends 1 to rank 2, adds rank 2's 0
           0 1         gets 1 back from rank 2
           0 1 2 3     gets 2 3 back from rank 1

Distances grow from 1, so sums keep rank order; halves are in one piece, so the chunk that a rank
ends the halving with has its position's bits in reverse.  Other counts fold in and out (see
`folding`), two rounds more.

Cost for n bytes: 2 log2 p alpha + 2 (p-1)/p n beta for a power of two; else 2 alpha + 2 n beta more
on the ranks that fold.
"""

from collections.abc import Callable, Iterator

from mpipar.schedule.classes import folded
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.folding import fold
from mpipar.schedule.registry import register


def halves(p: int, **_: object) -> int:
    """Count one chunk for each position: the largest power of two that is at most p."""
    return fold(p).size


@register(
    "all_reduce",
    "halving_doubling",
    "recursive halving, then recursive doubling (Rabenseifner 2004)",
    chunks=halves,
    ordered=True,
    symmetry=folded,
)
def all_reduce(p: int, rank: int) -> Iterator[Round]:
    """Yield 2 log2 p rounds for a power of two; else two more on the ranks that fold."""
    yield from filter(None, exchange(p, rank, first=0, member=int))


def exchange(p: int, me: int, first: int, member: Callable[[int], int]) -> Iterator[Round]:
    """Yield the rounds of member `me` of a group of `p`, on the chunks from `first` on.

    `member(i)` returns the rank of the group's i-th member.  All members number their rounds alike:
    one with nothing to do has an empty round.
    """
    folding = fold(p)
    everything = range(first, first + folding.size)
    if folding.folded(me):
        yield tuple(Send(member(me - 1), chunk) for chunk in everything)
        yield from ((),) * (2 * folding.size.bit_length() - 2)
        yield tuple(Recv(member(me - 1), chunk) for chunk in everything)
        return
    partner, position = folding.partner(me), folding.position(me)
    if folding.extra:
        paired = everything if partner is not None else range(0)
        yield tuple(RecvReduce(member(me + 1), chunk) for chunk in paired)
    steps = []  # (peer, the half that is kept, the half that is given away)
    kept, distance = everything, 1
    while distance < folding.size:
        peer = member(folding.rank(position ^ distance))
        low, high = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kept, given = (high, low) if position & distance else (low, high)
        steps.append((peer, kept, given))
        yield (
            *(Send(peer, chunk) for chunk in given),
            *(RecvReduce(peer, chunk) for chunk in kept),
        )
        distance *= 2
    for peer, kept, given in reversed(steps):
        yield (*(Send(peer, chunk) for chunk in kept), *(Recv(peer, chunk) for chunk in given))
    if folding.extra:
        yield tuple(Send(member(me + 1), chunk) for chunk in paired)
