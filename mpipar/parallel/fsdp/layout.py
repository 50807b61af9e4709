"""Where every parameter of a unit lies in one flat array, and which part of it each rank holds.

The parameters stand one behind the other, row-major, in segments: what travels as one message.
A segment is padded and cut in p equal blocks, across parameters, so that no rank has more than
another.  Three parameters of 5, 6 and 3 elements over 4 ranks, as one segment (block 4, 16 in all):

    whole    a a a a a b b b b b b c c c . .
    rank     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
    rank 1 holds a[4:5] and b[0:3], one array of 4 elements; b is spread over ranks 1 and 2

Not flattened, each parameter is a segment, cut by its first dimension (partition.blocks):

    whole    a a a a a | b b b b b b | c c c         b of shape (3, 2): rows 0, 1, 2, none
    rank     0 0 1 2 3   0 0 1 1 2 2   0 1 2

A rank's shard is its blocks of all segments, one behind the other.  Pure arithmetic, no MPI.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpipar.comm.buckets import MEGABYTE, Item, cut
from mpipar.partition import blocks, offsets, padded_blocks

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A part of the flat array that travels as one message.

    start: where it begins; sizes: of the block of each rank; members: the parameters in it;
    used: elements that are not padding.
    """

    start: int
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    used: int

    @property
    def where(self) -> slice:
        """Its place in the flat array."""
        return slice(self.start, self.start + sum(self.sizes))

    @property
    def padding(self) -> slice:
        """The place of its padding in the flat array."""
        return slice(self.start + self.used, self.where.stop)

    def block(self, rank: int) -> slice:
        """Return the place of a rank's block in the flat array."""
        start = self.start + sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


@dataclass(frozen=True)
class Share:
    """What one rank holds of one parameter: elements start..stop, row-major, at `offset` of its
    shard and at `where` of the flat array.
    """

    start: int
    stop: int
    offset: int
    where: slice


class Layout:
    """The flat array of a unit.

    places: the slice of each parameter; segments; total: its elements, padding included.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        dtype: np.dtype,
        ranks: int,
        flatten: bool = True,
        bucket_mb: float = 25,
    ) -> None:
        """Lay out parameters of these shapes over `ranks` ranks."""
        self.shapes, self.ranks, self.flatten = tuple(shapes), ranks, flatten
        self.places: list[slice] = [slice(0, 0)] * len(shapes)
        self.segments: list[Segment] = []
        self.total = 0
        if not flatten:
            groups = [[number] for number in range(len(shapes))]
        else:
            items = [Item(shape, dtype, "cpu") for shape in shapes]
            groups = cut(items, range(len(shapes)), bucket_mb * MEGABYTE)
        self.segment_of: dict[int, int] = {}
        for members in groups:
            self._append(members)

    def _append(self, members: Sequence[int]) -> None:
        """Add a segment of these parameters."""
        start = self.total
        for number in members:
            end = self.total + prod(self.shapes[number])
            self.places[number] = slice(self.total, end)
            self.segment_of[number] = len(self.segments)
            self.total = end
        used = self.total - start
        if self.flatten:
            sizes = (padded_blocks(used, self.ranks)[0],) * self.ranks
        else:
            rows, *others = self.shapes[members[0]] or (1,)
            sizes = tuple(n * prod(others) for n in blocks(rows, self.ranks))
        self.total = start + sum(sizes)
        self.segments.append(Segment(start, sizes, tuple(members), used))

    def shard_size(self, rank: int) -> int:
        """Return how many elements a rank holds, padding included."""
        return sum(segment.sizes[rank] for segment in self.segments)

    def shard_blocks(self, rank: int) -> list[slice]:
        """Return the place of each segment's block in a rank's shard."""
        sizes = [segment.sizes[rank] for segment in self.segments]
        return [slice(at, at + n) for at, n in zip(offsets(sizes), sizes, strict=True)]

    def share(self, number: int, rank: int) -> Share:
        """Return what a rank holds of parameter `number`; start == stop if it holds nothing."""
        place, which = self.places[number], self.segment_of[number]
        own = self.segments[which].block(rank)
        low = min(max(place.start, own.start), place.stop)
        high = max(low, min(place.stop, own.stop))
        inside = min(max(low - own.start, 0), own.stop - own.start)
        offset = self.shard_blocks(rank)[which].start + inside
        return Share(low - place.start, high - place.start, offset, slice(low, high))
