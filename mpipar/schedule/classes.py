"""Which ranks of a schedule behave alike, so that `simulate` runs one of each class.

`rotation`: every rank does what rank 0 does, r places on.  `exclusive_or`: every rank does what
rank 0 does with its partners' numbers xor r (powers of two).  Both are symmetries of the schedule;
on nodes of m ranks each, a rotation by m is one.

`folded`: the first positions stand for two ranks (see `folding`), so they are late by the time in
which the second rank's data come in; all others begin at once.  Lateness spreads with the exchanges
at distance 1, 2, 4, ...; after distance d, all positions below the next multiple of 2d are late:

    p = 13     8 positions    late at first   0 1 2 3 4
                              distance 1      0 1 2 3 4 5
                              distance 2      0 1 2 3 4 5 6 7       classes 0..4 | 5 | 6..7 | folded

Positions that become late after the same exchange are alike in time, though not symmetric.

`two_level`: on equal nodes of L ranks, inside each node a rotation by one, across nodes `folded`.

Each function takes the ranks of each node and returns None where it has no classes for them.
"""

from itertools import pairwise

from mpipar.schedule.core import Symmetry
from mpipar.schedule.folding import fold


def rotation(nodes: tuple[int, ...]) -> Symmetry | None:
    """Return m classes on nodes of m ranks each, but one if all ranks are on one node."""
    width = _width(nodes)
    if width is None:
        return None
    p = sum(nodes)

    def view(rank: int, peer: int) -> tuple[int, int]:
        shift = rank - rank % width
        return rank - shift, (peer - shift) % p

    return Symmetry(tuple((rank, p // width) for rank in range(width)), view)


def exclusive_or(nodes: tuple[int, ...]) -> Symmetry | None:
    """Return one class for a power of two of ranks on nodes that are powers of two."""
    width, p = _width(nodes), sum(nodes)
    if width is None or not _power_of_two(p) or not _power_of_two(width):
        return None
    return Symmetry(((0, p),), lambda rank, peer: (0, peer ^ rank))


def folded(nodes: tuple[int, ...]) -> Symmetry | None:
    """Return about log2 p classes for exchanges at growing distance among any number of ranks.

    On nodes of m ranks each, m has to be a power of two that divides the number of folded ranks:
    then all folded positions have one pattern of near and far partners, and the others another.
    """
    width, p = _width(nodes), sum(nodes)
    folding = fold(p)
    if not folding.extra:
        return exclusive_or(nodes)
    if width is None or not _power_of_two(width) or folding.extra % width:
        return None
    late = [0, folding.extra]  # class i of the positions is late[i] .. late[i+1] - 1
    while late[-1] < folding.size:
        distance = 1 << (len(late) - 1)
        late.append(-(-folding.extra // distance) * distance)
    classes = [(folding.rank(a), b - a) for a, b in pairwise(late) if a < b]
    representatives = [a for a, b in pairwise(late) for _ in range(a, b)]

    def view(rank: int, peer: int) -> tuple[int, int]:
        if folding.folded(rank):
            return 1, peer - rank + 1
        position = folding.position(rank)
        representative = representatives[position]
        if folding.folded(peer):
            return folding.rank(representative), folding.rank(representative) + peer - rank
        other = representative ^ position ^ folding.position(peer)
        return folding.rank(representative), folding.rank(other)

    return Symmetry((*classes, (1, folding.extra)), view, exact=False)


def two_level(layout: tuple[int, ...], nodes: tuple[int, ...]) -> Symmetry | None:
    """Return the classes of `folded` across the equal nodes `layout` that a schedule is made for.

    The network's `nodes` have to be the same, or all links alike.
    """
    local = layout[0]
    across = folded((1,) * len(layout))
    if across is None or min(layout) != max(layout) or (nodes != layout and _width(nodes) != 1):
        return None

    def view(rank: int, peer: int) -> tuple[int, int]:
        (node, place), (other, spot) = divmod(rank, local), divmod(peer, local)
        node, other = across.view(node, other)
        return node * local, other * local + (spot - place) % local

    classes = tuple((node * local, count * local) for node, count in across.classes)
    return Symmetry(classes, view, across.exact)


def _width(nodes: tuple[int, ...]) -> int | None:
    """Return the ranks of each node if all have as many, but 1 where all ranks are on one node."""
    if min(nodes) != max(nodes):
        return None
    return 1 if len(nodes) == 1 else nodes[0]


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
