"""Gathering: a unit is whole while it is computed, and the next one is on its way meanwhile.

Where parameters are freed, the units take turns in two buffers, and what is used by the whole model
has one of its own.  Few units that are large take turns in ONE, with no next one on its way: the
whole gradient of a unit takes the memory of the other (`costs_little` in unit.py draws the line).
Unit k always comes back to the SAME memory, since operations may have kept views of their weights
for backward:

    forward    use 0 (A), 1 on its way (B) | use 1 (B), 2 (A) | use 2 (A), 3 (B) | use 3 (B)
    backward   use 3 (B), 2 is still in A  | use 2 (A), 1 (B) | use 1 (B), 0 (A) | use 0 (A)

All ranks gather the same units in the same order: at each use the unit itself, if it is not there,
and then its neighbour, whatever the rank's data look like.  (The messages say which unit they are
of: where ranks run different ones, none gets another's parameters, and all get an error.)  Else
(ZeRO-1 and 2, or a copy that is not cut) every unit has a buffer that stays, and is gathered once a
step (watch.py says when).

Cost of a step: two all_gathers of the parameters if they are freed, else one.
"""

from collections.abc import Sequence
from typing import Any

from mpipar.arrays import Array
from mpipar.parallel.fsdp.links import Link
from mpipar.parallel.fsdp.unit import Unit


class Buffer:
    """Memory that one or several units take turns in."""

    def __init__(self) -> None:
        self.array: Array | None = None
        self.size = 0  # elements of the largest of its units
        self.held: Place | None = None  # who was gathered here last


class Place:
    """Where a unit is gathered, and whether it is there."""

    def __init__(self, unit: Unit, buffer: Buffer) -> None:
        self.unit, self.buffer = unit, buffer
        self.current = False  # the buffer has the values of the latest step
        self.handles: list[Any] = []  # of the all_gathers in flight
        buffer.size = max(buffer.size, unit.layout.total)


class Gatherer:
    """Brings units to where they are used; see the module.

    base: the units that the whole model uses; units: those that are used one after the other.
    frees: whether units are whole only where they are used; prefetches: whether the next one is on
    its way meanwhile.
    """

    def __init__(
        self,
        base: Sequence[Unit],
        units: Sequence[Unit],
        link: Link | None,
        frees: bool,
        prefetches: bool,
    ) -> None:
        self._link = link
        self._frees, self._prefetches = frees, prefetches or not frees
        turns = [Buffer() for _ in range(2 if prefetches else 1)]
        self._base = [Place(unit, Buffer()) for unit in base]
        own = [not frees or unit.cut.ranks == 1 for unit in units]
        self._units = [
            Place(unit, Buffer() if alone else turns[number % len(turns)])
            for number, (unit, alone) in enumerate(zip(units, own, strict=True))
        ]
        self._index = {id(place.unit): number for number, place in enumerate(self._units)}
        self.backward = False  # the direction in which units are used
        self.held = False  # all units stay whole, until `let_go`
        self._turns: list[Buffer] = []  # the buffers that units have when they do not
        self.peak_bytes = 0

    # -- uses ------------------------------------------------------------------------------------

    def begin(self, changed: bool) -> None:
        """A forward begins: bring what the whole model uses, and start the first unit.

        changed: whether the shards may have other values than those that were gathered.
        """
        self.backward = False
        if changed and not self.held:
            self.invalidate()
        for place in [*self._base, *self._units[:1]]:
            self._start(place)
        for place in self._base:
            self._finish(place)

    def use(self, unit: Unit) -> None:
        """Have a unit whole, and its neighbour on the way if that is prefetched."""
        number = self._index[id(unit)]
        place = self._units[number]
        self._start(place)
        self._finish(place)
        beside = number - 1 if self.backward else number + 1
        if self._prefetches and 0 <= beside < len(self._units):
            self._start(self._units[beside])

    def use_base(self) -> None:
        """Have what the whole model uses."""
        for place in self._base:
            self._start(place)
            self._finish(place)

    def rest(self) -> None:
        """The units are not used for now: where parameters are freed, only their memory stays."""
        if self._frees and not self.held:
            for place in self._places():
                self._drop(place)

    def invalidate(self) -> None:
        """The shards have got other values."""
        for place in self._places():
            self._wait(place)
            place.current = False

    def give_back(self) -> None:
        """Give back the memory of what is not used, where parameters are freed."""
        self.rest()
        for place in self._places():
            if place.buffer.held is None and not place.unit.in_place:
                place.buffer.array = None

    # -- everything at once ----------------------------------------------------------------------

    def hold(self) -> None:
        """Collective: gather all units, each to memory of its own, until `let_go`."""
        self.rest()
        self._turns = [place.buffer for place in self._units]
        for place in self._units:
            if self._frees and place.unit.cut.ranks > 1:
                place.buffer = Buffer()
                place.buffer.size = place.unit.layout.total
        self.invalidate()
        for place in self._places():
            self._start(place)
        for place in self._places():
            self._finish(place)
        self.held = True

    def let_go(self) -> None:
        """The units are whole only where they are used again."""
        self.held = False
        self.rest()
        for place, buffer in zip(self._units, self._turns, strict=True):
            place.buffer = buffer

    # -- one unit --------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [*self._base, *self._units]

    def _start(self, place: Place) -> None:
        """Post the all_gathers of a unit that is not there, nor on its way."""
        if place.current or place.handles:
            return
        unit, buffer = place.unit, place.buffer
        if buffer.held is not place:
            if buffer.held is not None:
                self._drop(buffer.held)
            buffer.held = place
        if buffer.array is None:
            fits = unit.whole if unit.in_place else None
            buffer.array = unit.xp.empty(buffer.size, unit.narrow) if fits is None else fits
            self.peak_bytes = max(self.peak_bytes, self.buffer_bytes)
        whole = buffer.array[: unit.layout.total]
        for segment, own in zip(unit.layout.segments, unit.owns, strict=True):
            block = whole[segment.block(unit.cut.rank)]
            if unit.cut.ranks == 1 or unit.narrow != unit.wide:
                if not unit.in_place:
                    block[...] = own  # rounded, if it is to be narrower
                own = block
            if unit.cut.ranks > 1:
                assert self._link is not None
                what = f"{unit.label} for {'backward' if self.backward else 'forward'}"
                sent = self._link.all_gather(own, whole[segment.where], segment.sizes, what)
                place.handles.append(sent)
        unit.point(whole)
        place.current = not place.handles

    def _finish(self, place: Place) -> None:
        """Wait until a unit is there."""
        if not place.current:
            self._wait(place)
            place.current = True

    def _wait(self, place: Place) -> None:
        for handle in place.handles:
            handle.wait()
        place.handles = []

    def _drop(self, place: Place) -> None:
        """Let others have the memory of a unit."""
        self._wait(place)
        if place.unit.cut.ranks > 1 and not place.unit.in_place:
            place.current = False
            place.unit.release()
            if place.buffer.held is place:
                place.buffer.held = None

    # -- memory ----------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are there now, those of shards that stay included."""
        arrays = {id(p.buffer): p.buffer.array for p in self._places()}
        return sum(array.nbytes for array in arrays.values() if array is not None)
