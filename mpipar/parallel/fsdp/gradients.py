"""The gradients of a unit: whole while backward writes them, then this rank's part of the sums.

    whole    a a a a a b b b b b b c c c . .      Parameter.home of a, b, c: backward writes here
    owns             [a b b b]                    shard.grad of a and b: views of this

Where whole gradients are kept (ZeRO-1, or a copy that is not cut) the sums are a part of the same
memory; else the units take turns in a few buffers.
"""

from collections.abc import Sequence

from mpipar.arrays import Array
from mpipar.parallel.fsdp.layout import Segment
from mpipar.parallel.fsdp.unit import Unit


class Pool:
    """Flat buffers of whole gradients that units take turns in."""

    def __init__(self) -> None:
        self.free: list[Array] = []
        self.taken = 0
        self.bytes = 0

    def take(self, unit: Unit) -> Array:
        """Return a buffer for the unit's gradients."""
        self.taken += 1
        need = unit.layout.total
        fits = [a for a in self.free if a.size >= need and a.dtype == unit.narrow]
        if fits:
            best = min(fits, key=lambda array: array.size)
            self.free = [array for array in self.free if array is not best]
            return best
        array = unit.xp.empty(need, unit.narrow)
        self.bytes += array.nbytes
        return array

    def put(self, array: Array) -> None:
        """Take a buffer back."""
        self.taken -= 1
        self.free.append(array)

    def clear(self) -> None:
        """Give back the memory of the free ones."""
        self.bytes -= sum(array.nbytes for array in self.free)
        self.free.clear()


class Gradients:
    """The gradients of one unit: whole while backward writes them, then this rank's blocks."""

    def __init__(self, unit: Unit, keeps: bool) -> None:
        self.unit = unit
        self.keeps = keeps or unit.cut.ranks == 1
        self.whole: Array | None = None
        self.owns: list[Array] = []  # this rank's blocks of the sums, in the dtype of the shards
        self.before: list[Array] | None = None  # what the shards had before, to be added to
        self.had = [False] * len(unit.params)  # which of them had something
        self.used = [False] * len(unit.params)
        self.pending = False  # something is in `whole` that was not reduced
        self.expected = False  # in the backward that runs
        self.missing = [0] * len(unit.layout.segments)
        self.flying = 0  # segments that are not reduced

    @property
    def in_place(self) -> bool:
        """Whether the sums are parts of the buffer that backward writes."""
        return self.keeps and self.unit.narrow == self.unit.wide

    def open(self, pool: Pool) -> None:
        """Let backward write into a buffer; set aside what the shards have."""
        unit, first = self.unit, not self.pending
        if first:
            self.pending = True
            self._set_aside()
        if self.whole is None:
            kept = unit.xp.empty(unit.layout.total, unit.narrow) if self.keeps else None
            self.whole = pool.take(unit) if kept is None else kept
        if not self.owns:
            self._make_owns()
        if first:
            self.flying = len(unit.layout.segments)
            for number, param in enumerate(unit.params):
                param.home = unit.view(self.whole, number)

    def _make_owns(self) -> None:
        unit = self.unit
        if self.in_place:
            assert self.whole is not None
            where = [segment.block(unit.cut.rank) for segment in unit.layout.segments]
            self.owns = [self.whole[block] for block in where]
        else:
            self.owns = [unit.xp.empty(own.shape, unit.wide) for own in unit.owns]

    def _set_aside(self) -> None:
        """Copy the gradients that the shards have; they keep the copies until there are sums."""
        unit = self.unit
        self.had = [shard.grad is not None for shard in unit.shards]
        if not any(self.had):
            return
        self.before = [unit.xp.zeros(own.shape, unit.wide) for own in unit.owns]
        for number, shard in enumerate(unit.shards):
            if shard.grad is not None:
                copy = unit.part(self.before, number)
                copy[...] = shard.grad
                shard.grad = copy

    def close(self, segment: Segment) -> Array:
        """Return the whole gradients of a segment, complete: zeros where there are none."""
        assert self.whole is not None
        for number in segment.members:
            param = self.unit.params[number]
            place = self.unit.view(self.whole, number)
            self.used[number] = param.grad is not None
            if param.grad is None:
                place[...] = 0
            elif param.grad is not param.home:
                place[...] = param.grad
            param.grad = None
        self.whole[segment.padding] = 0
        return self.whole[segment.where]

    def landed(self, pool: Pool) -> None:
        """One segment less needs the buffer; the last gives it back."""
        self.flying -= 1
        if self.flying == 0 and not self.keeps and self.whole is not None:
            pool.put(self.whole)
            self.whole = None

    def hand_out(self, used: Sequence[bool]) -> None:
        """Leave the sums in the shards: None where no rank has used a parameter."""
        for param in self.unit.params:
            param.home = None
        if self.before is not None:
            for own, before in zip(self.owns, self.before, strict=True):
                own += before
        for number, shard in enumerate(self.unit.shards):
            here = used[number] or self.had[number]
            shard.grad = self.unit.part(self.owns, number) if here else None
        self.before, self.pending = None, False

    def forget(self) -> None:
        """Drop what was not reduced."""
        self.before = None
        self.had = [False] * len(self.had)
        for param in self.unit.params:
            param.grad = None

    def drop(self, pool: Pool) -> None:
        """Be as if the backwards since the last sync had not been."""
        self.forget()
        for param in self.unit.params:
            param.home = None
        if self.whole is not None and not self.keeps:
            pool.put(self.whole)
            self.whole = None
        self.pending = self.expected = False

    @property
    def bytes(self) -> int:
        """Bytes of what this unit holds, buffers of the pool not included."""
        own = 0 if self.in_place else sum(own.nbytes for own in self.owns)
        kept = self.whole.nbytes if self.keeps and self.whole is not None else 0
        before = sum(array.nbytes for array in self.before or ())
        return own + kept + before
