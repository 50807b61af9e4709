"""Two-level all_reduce: inside the nodes, across the nodes, inside the nodes again.

The vector is cut into as many shards as the largest node has ranks.  Two nodes of two ranks:

    inside    0 <-> 1    2 <-> 3      direct reduce_scatter: 0 and 2 own shard 0, 1 and 3 shard 1
    across    0 <-> 2    1 <-> 3      all_reduce of each shard among its owners, by halving-doubling
    inside    0 <-> 1    2 <-> 3      direct all_gather

All ranks of a node use the network at once, each for its own shard of 1/L of the vector (the three
steps of Mikami et al., "2D-torus all-reduce", 2018; halving-doubling across the nodes as Goyal et
al., 2017, have it).  Where nodes differ in size, a rank of a smaller node owns several consecutive
shards: with nodes of 3 and 1 ranks, rank 3 owns all three shards and exchanges one with each of
ranks 0, 1 and 2.

A shard is cut again into 2^k chunks, for the halving.  Nodes are consecutive ranks, operands inside
a node meet in rank order, and halving-doubling keeps the order of nodes: so rank order is kept.

All ranks number their rounds alike, so that `stagger` can cut the vector into parts that follow one
another: while one part is inside the nodes, another is between them.

Cost for n bytes, N nodes of L ranks: 2 (L-1) alpha + 2 (L-1)/L n beta inside, and 2 log2 N alpha +
2 (N-1)/N n/L beta across (for N a power of two).
"""

from collections.abc import Iterator
from functools import lru_cache, partial

from mpipar.partition import offsets
from mpipar.schedule.classes import two_level
from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.folding import fold
from mpipar.schedule.halving_doubling import exchange
from mpipar.schedule.registry import register

starts = lru_cache(maxsize=64)(offsets)  # the first rank of each node


def chunk_count(p: int, nodes: tuple[int, ...]) -> int:
    """Count the chunks: 2^k for each shard, where 2^k is at most the number of nodes."""
    return max(nodes) * fold(len(nodes)).size


@register(
    "all_reduce",
    "hierarchical",
    "inside the nodes, across them by halving-doubling, inside again (Mikami et al. 2018)",
    chunks=chunk_count,
    ordered=True,
    options=("nodes",),
    symmetry=two_level,
)
def all_reduce(p: int, rank: int, nodes: tuple[int, ...]) -> Iterator[Round]:
    """Yield the rounds inside the node, then across the nodes, then inside again."""
    first_of = starts(nodes)
    node = next(i for i, first in enumerate(first_of) if rank < first + nodes[i])
    local = range(first_of[node], first_of[node] + nodes[node])
    shards, width = max(nodes), fold(len(nodes)).size

    def owner(shard: int, node: int) -> int:
        return first_of[node] + shard * nodes[node] // shards

    owned: dict[int, list[int]] = {peer: [] for peer in local}
    for c in range(shards * width):
        owned[owner(c // width, node)].append(c)
    own = owned[rank]
    others = [*range(rank + 1, local.stop), *range(local.start, rank)]  # from the next one round
    foreign = [(c, who) for who in others for c in owned[who]]
    if shards > 1:  # a rank alone on its node keeps the round: rounds are numbered alike
        sends = [Send(who, c) for c, who in foreign]
        yield (*sends, *(RecvReduce(peer, c) for peer in others for c in own))
    across = [
        exchange(len(nodes), node, shard * width, partial(owner, shard))
        for shard in range(own[0] // width, own[-1] // width + 1)
    ]
    for rounds in zip(*across, strict=True):  # one round of each shard at a time
        yield tuple(op for ops in rounds for op in ops)
    if shards > 1:
        sends = [Send(peer, c) for peer in others for c in own]
        yield (*sends, *(Recv(who, c) for c, who in foreign))
