"""Which bytes of a file a rank's block is: runs of neighbours in the global array, from its spec.

    columns 2..3 of a (3, 4) array      . . x x | . . x x | . . x x
    local elements                          0 1       2 3       4 5
    runs (local, global, length)        (0, 2, 2)  (2, 6, 2)  (4, 10, 2)

A local block, row-major, is its runs one behind the other, in ascending global order.  A block of
whole rows is a single run.  Any range of local elements is runs too: a Flat placement, and what a
rank writes of a block that others hold as well.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from mpipar.nn.spec import Spec


@dataclass(frozen=True)
class Runs:
    """Ranges of neighbours, int64 arrays of one length, in elements or in bytes.

    local: where each begins in the local block; where: in the global array, or in the file.
    """

    local: np.ndarray
    where: np.ndarray
    length: np.ndarray

    @property
    def total(self) -> int:
        """How many elements, or bytes, there are in all."""
        return int(self.length.sum())

    def part(self, start: int, stop: int) -> "Runs":
        """Return the runs of local elements start..stop, counted from the first of these runs."""
        if not len(self.local) or stop <= start:
            return Runs(*(np.zeros(0, np.int64),) * 3)
        base = int(self.local[0])
        low, high = base + start, base + stop
        first = int(np.searchsorted(self.local, low, "right")) - 1
        last = int(np.searchsorted(self.local, high, "left"))
        local, where = self.local[first:last].copy(), self.where[first:last].copy()
        length = self.length[first:last].copy()
        length[-1] = min(int(length[-1]), high - int(local[-1]))
        skipped = low - int(local[0])
        local[0] += skipped
        where[0] += skipped
        length[0] -= skipped
        return Runs(local, where, length)

    def between(self, low: int, high: int) -> tuple[int, int]:
        """Return start and stop, as `part` takes them, of what lies in low..high of the file.

        For runs in ascending order.
        """
        ends = self.where + self.length
        first = int(np.searchsorted(ends, low, "right"))
        last = int(np.searchsorted(self.where, high, "left"))
        if first >= last:
            return 0, 0
        base = int(self.local[0])
        start = int(self.local[first]) + max(0, low - int(self.where[first]))
        stop = int(self.local[last - 1]) + min(
            high - int(self.where[last - 1]), int(self.length[last - 1])
        )
        return start - base, stop - base

    def in_bytes(self, itemsize: int, start: int) -> "Runs":
        """Return the same in bytes, for an array that begins at byte `start` of a file."""
        return Runs(self.local * itemsize, self.where * itemsize + start, self.length * itemsize)


def runs_of(spec: Spec) -> Runs:
    """Return the runs of what this rank holds, in elements."""
    whole = _runs_of_block(spec)
    if spec.flat is None:
        return whole
    return whole.part(spec.flat.start, spec.flat.stop)


def _runs_of_block(spec: Spec) -> Runs:
    """Return the runs of the whole local block."""
    shape, pieces = spec.shape, spec.pieces
    if not prod(spec.block_shape):
        return Runs(*(np.zeros(0, np.int64),) * 3)
    cut = len(shape) - 1  # the last dimension of which the block has not all
    while cut > 0 and pieces[cut] == ((0, shape[cut]),):
        cut -= 1
    if cut < 0:  # a number
        return Runs(*(np.array([n], np.int64) for n in (0, 0, 1)))
    before = np.zeros(1, np.int64)  # global index of every row of the dimensions before `cut`
    for dim in range(cut):
        along = spec.index_along(dim).astype(np.int64) * prod(shape[dim + 1 :])
        before = (before[:, None] + along).reshape(-1)
    stride = prod(shape[cut + 1 :])
    starts = np.array([offset for offset, _ in pieces[cut]], np.int64) * stride
    sizes = np.array([size for _, size in pieces[cut]], np.int64) * stride
    where = (before[:, None] + starts).reshape(-1)
    length = np.tile(sizes, len(before))
    return Runs(np.cumsum(length) - length, where, length)
