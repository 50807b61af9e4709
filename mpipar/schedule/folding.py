"""Powers of two: fold any number of ranks onto the largest power of two below it.

Algorithms that exchange with the partner whose number differs in one bit need 2^k ranks.  Of p
ranks the first 2 (p - 2^k) are paired, neighbour with neighbour; the odd one of each pair hands its
data to the even one and takes no part until the result comes back (Thakur, Rabenseifner, Gropp
2005, section 4.5).  What is left has positions 0..2^k-1:

    p = 6      rank   0 1   2 3   4   5
    position          0     1     2   3

Neighbours are paired, so a position stands for one or two consecutive ranks and rank order is kept.
"""

from typing import NamedTuple


class Folding(NamedTuple):
    """How `p` ranks fold onto `size` positions; the first `extra` positions stand for two ranks."""

    size: int
    extra: int

    def rank(self, position: int) -> int:
        """Return the rank at a position (of two ranks, the one that takes part)."""
        return position + min(position, self.extra)

    def ranks(self, position: int, count: int = 1) -> range:
        """Return the one or two ranks of each of `count` consecutive positions."""
        return range(self.rank(position), self.rank(position + count))

    def position(self, rank: int) -> int:
        """Return the position that stands for a rank."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def partner(self, rank: int) -> int | None:
        """Return the other rank of its pair, if a rank has one."""
        return rank ^ 1 if rank < 2 * self.extra else None

    def folded(self, rank: int) -> bool:
        """Say whether a rank hands its data over and takes no part."""
        return rank < 2 * self.extra and rank % 2 == 1


def fold(p: int) -> Folding:
    """Return the folding of `p` ranks onto the largest power of two that is at most p."""
    size = 1 << (p.bit_length() - 1)
    return Folding(size, p - size)
