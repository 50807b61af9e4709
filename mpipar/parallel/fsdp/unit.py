"""A unit: parameters that are gathered, and whose gradients are reduced, together.

Two Parameters stand for each of the module's.  `param`, the module's own, points into a flat buffer
that holds the unit whole while it is computed; `shard`, what the optimiser sees, is this rank's
part of it, with a `spec` that says which:

    buffer   a a a a a b b b b b b c c c . .       param b: [4..10], of shape (3, 2)
    rank 1           [a b b b]                     shard b: 3 elements, Flat(0, 3) on axis "dp"

In a unit that is not cut (`ranks` is 1) the shards have the parameters' shapes and specs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.nn.module import Parameter
from mpipar.nn.spec import Spec
from mpipar.parallel.fsdp.freed import Freed
from mpipar.parallel.fsdp.layout import Layout

SPARE = 0.025  # of what a rank keeps: memory that speed may take


class Named(NamedTuple):
    """A parameter of the module and its path there."""

    name: str
    param: Parameter


class Cut(NamedTuple):
    """How a unit is cut: over how many ranks, which of the blocks is ours, and who else has it."""

    axis: str
    ranks: int
    rank: int
    copies: int
    flatten: bool
    bucket_mb: float


class Unit:
    """See the module.

    owns: this rank's block of each segment: arrays in the dtype of the parameters.
    wide, narrow: the dtypes of shards, and of what is gathered and computed with.
    in_place: whether the shards are parts of a buffer that stays, so that gathering moves only what
    other ranks hold.
    """

    def __init__(
        self, label: str, members: Sequence[Named], cut: Cut, narrow: np.dtype | None, stays: bool
    ) -> None:
        """Cut the parameters as they are now; the whole ones are let go if nothing `stays`."""
        self.label, self.cut = label, cut
        self.names = [member.name for member in members]
        self.params = [member.param for member in members]
        first = self.params[0].data
        self.xp = module_of(first)
        self.wide = first.dtype
        self.narrow = self.wide if narrow is None else narrow
        shapes = [tuple(param.data.shape) for param in self.params]
        self.layout = Layout(shapes, self.wide, cut.ranks, cut.flatten, cut.bucket_mb)
        self.stays, self.in_place = stays, stays and self.narrow == self.wide
        self.whole: Array | None = None  # the buffer that the module's parameters point into
        self.given: list[Array] = []  # what the module's parameters have been given as data
        self.owns = self._cut_values()
        self.shards = [self._shard(number) for number in range(len(self.params))]
        self.parts = [shard.data for shard in self.shards]
        if self.whole is None:
            self.release()

    def _cut_values(self) -> list[Array]:
        """Return this rank's blocks of the values that the parameters have."""
        whole = self.xp.zeros(self.layout.total, self.wide)
        for param, place in zip(self.params, self.layout.places, strict=True):
            whole[place] = param.data.reshape(-1)
        blocks = [segment.block(self.cut.rank) for segment in self.layout.segments]
        if self.in_place:
            self.point(whole)
            return [whole[block] for block in blocks]
        shard = self.xp.empty(self.layout.shard_size(self.cut.rank), self.wide)
        owns = [shard[block] for block in self.layout.shard_blocks(self.cut.rank)]
        for own, block in zip(owns, blocks, strict=True):
            own[...] = whole[block]
        return owns

    def _shard(self, number: int) -> Parameter:
        """Return what the optimiser sees of parameter `number`."""
        param = self.params[number]
        shard = Parameter(self.part(self.owns, number), self._spec(number))
        shard.requires_grad = param.requires_grad
        return shard

    def _spec(self, number: int) -> Spec:
        spec, cut = self.params[number].spec, self.cut
        if cut.ranks == 1:
            return spec
        if not cut.flatten:
            return spec.shard(cut.axis, 0, cut.rank, cut.ranks, copies=cut.copies)
        share = self.layout.share(number, cut.rank)
        return spec.flatten(cut.axis, share.start, share.stop, cut.copies)

    def part(self, owns: Sequence[Array], number: int) -> Array:
        """Return the view of parameter `number` in arrays like `owns`, shaped as its shard."""
        share = self.layout.share(number, self.cut.rank)
        which = self.layout.segment_of[number]
        start = share.where.start - self.layout.segments[which].block(self.cut.rank).start
        flat = owns[which][max(start, 0) :][: share.stop - share.start]
        shape = self.layout.shapes[number]
        if self.cut.ranks == 1:
            return flat.reshape(shape)
        if not self.cut.flatten:
            rows = self._spec(number).local_shape[0]
            return flat.reshape(rows, *shape[1:])
        return flat

    def view(self, whole: Array, number: int) -> Array:
        """Return parameter `number` in a flat array of the whole unit."""
        return whole[self.layout.places[number]].reshape(self.layout.shapes[number])

    def point(self, whole: Array) -> None:
        """Let the module's parameters be views of this flat array."""
        if self.whole is whole:
            return
        self.whole = whole
        self._give([self.view(whole, number) for number in range(len(self.params))])

    def release(self) -> None:
        """Leave nothing in the module's parameters: whoever uses one now gets an error."""
        self.whole = None
        shapes = zip(self.names, self.layout.shapes, strict=True)
        self._give([Freed(name, len(shape), self.narrow) for name, shape in shapes])

    def _give(self, arrays: list[Array]) -> None:
        self.given = arrays
        for param, array in zip(self.params, arrays, strict=True):
            param.data = array

    def restore(self, whole: Array) -> None:
        """Give the module's parameters values of their own, in the dtype they had."""
        self.whole = None
        for number, param in enumerate(self.params):
            param.data = self.xp.array(self.view(whole, number))
            param.on_update = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradients."""
        return self.layout.total * self.narrow.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the values that this rank keeps."""
        return sum(own.nbytes for own in self.owns)

    @property
    def kept_bytes(self) -> int:
        """Bytes of values between steps: the shards', and of the whole where that stays."""
        if self.in_place:
            return self.layout.total * self.wide.itemsize
        whole = self.layout.total * self.narrow.itemsize if self.stays else 0
        return self.shard_bytes + whole


def costs_little(units: Sequence[Unit], buffers: int) -> bool:
    """Say whether so many buffers, each for any of the units, are little beside what is kept.

    By a rank on average, since all must say the same: they gather in the same order.
    """
    largest = max((unit.gradient_bytes for unit in units), default=0)
    shards = sum(unit.layout.total * unit.wide.itemsize / unit.cut.ranks for unit in units)
    return buffers * largest <= SPARE * 4 * shards  # values, gradients and two moments
