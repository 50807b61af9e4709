"""Linear reduce, gather and scatter: the root deals with every other rank itself, in one round.

    gather on 4 ranks to root 1      0 --> 1 <-- 2
                                           ^---- 3

The root of a reduce adds x0 + x1 + ... + x(p-1), one after the other, whatever the root.

Cost: (p-1) alpha + n beta at the root, where n bytes in all go through its link.  Good for few
ranks, and for blocks so large that alpha does not matter: no block travels twice.
"""

from collections.abc import Iterator

from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import one, per_rank, register


@register(
    "reduce",
    "linear",
    "all straight to the root, which adds from rank 0 to p-1",
    chunks=one,
    ordered=True,
    options=("root",),
)
def reduce(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield one round: the whole vector to the root."""
    if rank != root:
        yield (Send(root, 0),)
    elif p > 1:
        yield tuple(RecvReduce(peer, 0) for peer in range(p) if peer != root)


@register("gather", "linear", "all straight to the root", chunks=per_rank, options=("root",))
def gather(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield one round: own chunk to the root."""
    if rank != root:
        yield (Send(root, rank),)
    elif p > 1:
        yield tuple(Recv(peer, peer) for peer in range(p) if peer != root)


@register("scatter", "linear", "all straight from the root", chunks=per_rank, options=("root",))
def scatter(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield one round: own chunk from the root."""
    if rank != root:
        yield (Recv(root, rank),)
    elif p > 1:
        yield tuple(Send(peer, peer) for peer in range(p) if peer != root)
