"""Broadcast of long vectors: scatter down a tree, then all_gather round the ring.

Barnett, Gupta, Payne, Shuler, van de Geijn, Watts 1994; Thakur, Rabenseifner, Gropp 2005,
section 4.2.

    root 0 of 4 ranks       scatter               ring
    0: 0 1 2 3              0: 0 1 2 3
    1:                      1:   1                1: + 0, + 3, + 2
    2:                      2:     2 3            2: + 1, + 0
    3:                      3:       3            3: + 2, + 1, + 0

After the scatter a rank holds the blocks of its whole subtree, not only its own; what the next
rank holds already is not sent again (Zhou, Marjanovic, Niethammer, Gracia, ICPP Workshops 2015).

Cost for n bytes: at most (ceil log2 p + p-1) alpha + 2 (p-1)/p n beta, against the tree's
(ceil log2 p) n beta.
"""

from collections.abc import Iterator

from mpipar.schedule.core import Recv, Round, Send
from mpipar.schedule.registry import per_rank, register
from mpipar.schedule.tree import scatter, subtree


@register(
    "broadcast",
    "scatter_all_gather",
    "tree scatter, then ring all_gather of what is missing (Barnett et al. 1994)",
    chunks=per_rank,
    options=("root",),
)
def broadcast(p: int, rank: int, root: int) -> Iterator[Round]:
    """Yield the rounds of the scatter, then up to p-1 rounds round the ring."""
    yield from scatter(p, rank, root)
    after, before = (rank + 1) % p, (rank - 1) % p
    has, after_has = subtree(p, rank, root), subtree(p, after, root)
    for step in range(p - 1):
        mine, theirs = (rank - step) % p, (before - step) % p
        sends = () if mine in after_has else (Send(after, mine),)
        receives = () if theirs in has else (Recv(before, theirs),)
        if ops := sends + receives:
            yield ops
