"""Binomial trees: broadcast, reduce, gather, scatter, and all_reduce as reduce then broadcast.

The ranks low..high-1 are split at low + 2^k, the largest power of two that leaves both halves
something.  Each half has its own root: the tree's root if it is there, else its lowest rank.  One
edge, of level k, joins the two; then each half is split in the same way.

    8 ranks, root 0                        8 ranks, root 5

    level 2   0 ------- 4                  0 ------------- 5
    level 1   0 -- 2    4 -- 6             0 -- 2    5 --- 6
    level 0   0-1  2-3  4-5  6-7           0-1  2-3  4-5   6-7

A broadcast goes down the levels, a reduce up.  With root 0 this is the classic binomial tree
(Thakur, Rabenseifner, Gropp 2005, sections 4.2 and 4.5).  For any other root it is no rotation of
it: a subtree is always a run of consecutive ranks, and the two sums that meet at an edge are
neighbours, so every reduction keeps rank order, and what gather and scatter send is one piece.

Cost for n bytes in all: broadcast and reduce (ceil log2 p) (alpha + n beta); gather and scatter
(ceil log2 p) alpha + (p-1)/p n beta.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mpipar.schedule.core import Recv, RecvReduce, Round, Send
from mpipar.schedule.registry import one, per_rank, register


class Edge(NamedTuple):
    """An edge of the tree; the child's subtree is the ranks of `below`."""

    level: int
    parent: int
    child: int
    below: range


def edges(p: int, rank: int, root: int) -> list[Edge]:
    """Return the edges at `rank`, from the top level down: first the one to its parent, if any."""
    low, high = 0, p
    found = []
    while high - low > 1:
        level = (high - low - 1).bit_length() - 1
        middle = low + (1 << level)
        parent = root if low <= root < high else low
        below = range(middle, high) if parent < middle else range(low, middle)
        if rank in (parent, below[0]):
            found.append(Edge(level, parent, below[0], below))
        low, high = (low, middle) if rank < middle else (middle, high)
    return found


def subtree(p: int, rank: int, root: int) -> range:
    """Return the ranks of the subtree of `rank`."""
    if rank == root:
        return range(p)
    return next(edge.below for edge in edges(p, rank, root) if edge.child == rank)


@register(
    "broadcast",
    "tree",
    "binomial tree from the root (Thakur et al. 2005)",
    chunks=one,
    options=("root",),
)
def broadcast(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield a round for each edge at this rank, from the top level down."""
    for edge in edges(p, rank, root):
        yield (Send(edge.child, 0) if rank == edge.parent else Recv(edge.parent, 0),)


@register(
    "reduce",
    "tree",
    "binomial tree to the root, in rank order (Thakur et al. 2005)",
    chunks=one,
    ordered=True,
    options=("root",),
)
def reduce(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield a round for each edge at this rank, from the bottom level up."""
    for edge in reversed(edges(p, rank, root)):
        yield (RecvReduce(edge.child, 0) if rank == edge.parent else Send(edge.parent, 0),)


@register(
    "all_reduce",
    "tree",
    "binomial reduce to rank 0, then binomial broadcast",
    chunks=one,
    ordered=True,
)
def all_reduce(p: int, rank: int) -> Iterator[Round]:
    """Yield the rounds of the reduce to rank 0, then those of the broadcast from it."""
    yield from reduce(p, rank, 0)
    yield from broadcast(p, rank, 0)


@register(
    "scatter",
    "tree",
    "binomial tree, each edge carries its subtree's blocks",
    chunks=per_rank,
    options=("root",),
)
def scatter(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield a round for each edge at this rank, from the top level down."""
    for edge in edges(p, rank, root):
        if rank == edge.parent:
            yield tuple(Send(edge.child, chunk) for chunk in edge.below)
        else:
            yield tuple(Recv(edge.parent, chunk) for chunk in edge.below)


@register(
    "gather",
    "tree",
    "binomial tree, each edge carries its subtree's blocks",
    chunks=per_rank,
    options=("root",),
)
def gather(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield a round for each edge at this rank, from the bottom level up."""
    for edge in reversed(edges(p, rank, root)):
        if rank == edge.parent:
            yield tuple(Recv(edge.child, chunk) for chunk in edge.below)
        else:
            yield tuple(Send(edge.parent, chunk) for chunk in edge.below)
