"""Counters in shared memory by which the ranks of a node tell each other how far they are.

    READY      r:  my contribution to reduction k is written
    REDUCED    r:  my block of result k is written, and I have read what I needed of yours
    RELEASED   r:  I do not read result k any more

Each counter has one writer, only grows, and lies 64 bytes from the next, in a cache line of its
own.  The window is synchronised before a counter is set, so that what it promises is in memory, and
before and after it is read, so that nothing older is read behind it (MPI-3.1, section 11.7: the
unified memory model needs these barriers, and no more).
"""

from collections.abc import Callable

import numpy as np

READY, REDUCED, RELEASED = range(3)
KINDS = 3
LINE = 64  # bytes


class Flags:
    """The counters of the ranks of one node; `rank` is this one's number among them."""

    __slots__ = ("_all", "_least", "_rank", "_sync")

    def __init__(
        self, memory: np.ndarray, ranks: int, rank: int, sync: Callable[[], object]
    ) -> None:
        lines = memory[: self.nbytes(ranks)].view(np.int64).reshape(KINDS, ranks, LINE // 8)
        self._all = lines[:, :, 0]  # (KINDS, ranks)
        self._rank, self._sync = rank, sync
        self._least = [0] * KINDS  # what all ranks had reached when that was last read

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the bytes that the counters of a node take."""
        return KINDS * ranks * LINE

    def set(self, kind: int, number: int) -> None:
        """Set this rank's counter; it never goes back."""
        self._sync()
        if self._all[kind, self._rank] < number:
            self._all[kind, self._rank] = number
        self._sync()

    def reached(self, kind: int, number: int) -> bool:
        """Say whether all ranks of the node have come to `number`.  About 1 us."""
        if self._least[kind] >= number:
            return True
        self._sync()
        self._least[kind] = min(self._all[kind].tolist())
        self._sync()
        return self._least[kind] >= number

    def behind(self, kind: int, number: int) -> list[int]:
        """Return the ranks of the node that have not come to `number` yet."""
        return np.flatnonzero(self._all[kind] < number).tolist()
