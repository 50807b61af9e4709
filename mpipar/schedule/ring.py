"""Ring algorithms: every rank sends to the next one and receives from the one before, only.

Baidu's ring all_reduce (Gibiansky 2017; Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009)
is a reduce_scatter followed by an all_gather.  Where chunk 2 is on 4 ranks:

    reduce_scatter   3 -> 0 -> 1 -> 2      each rank adds its own and passes the sum on
    all_gather       2 -> 3 -> 0 -> 1      each rank keeps a copy and passes it on

In every round each of the p chunks is on another link, so all links work all the time.

Cost for n bytes: reduce_scatter and all_gather (p-1) (alpha + n/p beta), all_reduce twice that,
shift alpha + n beta.  The sum of chunk c starts at rank c+1, so it is not in rank order.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import rotation
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import per_rank, register


@register(
    "reduce_scatter",
    "ring",
    "sums travel round the ring (Patarasuk, Yuan 2009)",
    chunks=per_rank,
    symmetry=rotation,
)
def reduce_scatter(p: int, rank: int) -> Iterator[Round]:
    """Yield p-1 rounds; the sum of chunk c travels from rank c+1 round to rank c."""
    after, before = (rank + 1) % p, (rank - 1) % p
    for step in range(1, p):
        yield Send(after, (rank - step) % p), RecvReduce(before, (rank - step - 1) % p)


@register(
    "all_gather",
    "ring",
    "blocks travel round the ring (Chan et al. 2007)",
    chunks=per_rank,
    symmetry=rotation,
)
def all_gather(p: int, rank: int) -> Iterator[Round]:
    """Yield p-1 rounds; chunk c travels from rank c round to rank c-1."""
    after, before = (rank + 1) % p, (rank - 1) % p
    for step in range(p - 1):
        yield Send(after, (rank - step) % p), Recv(before, (rank - step - 1) % p)


@register(
    "all_reduce",
    "ring",
    "ring reduce_scatter, then ring all_gather (Patarasuk, Yuan 2009)",
    chunks=per_rank,
    symmetry=rotation,
)
def all_reduce(p: int, rank: int) -> Iterator[Round]:
    """Yield 2(p-1) rounds: the reduce_scatter's, then the all_gather's."""
    yield from reduce_scatter(p, rank)
    yield from all_gather(p, rank)


@register(
    "shift",
    "ring",
    "every rank sends to rank + offset",
    chunks=per_rank,
    options=("offset",),
    symmetry=rotation,
)
def shift(p: int, rank: int, offset: int) -> Iterator[Round]:
    """Yield one round, or none if the offset is a multiple of p."""
    if offset % p:
        source = (rank - offset) % p
        yield Send((rank + offset) % p, rank), Recv(source, source)
