"""Reducing: gradients go to the shards while backward still computes others.

    backward   unit 2 | unit 1 | unit 0 | base
    in flight           2        1 2      0 1      end: wait for all, leave them in shard.grad

Once a segment of a unit is complete it is reduced: by reduce_scatter over the ranks that share a
copy, then by all_reduce over those that hold the same block.  All ranks start the segments in ONE
order, that of backward: a segment waits for those before it.  What a rank did not use counts as
zeros; one small all_reduce (a byte a parameter) finds out what nobody used, whose gradient is None.
Without a sync gradients stay whole, and are added up.

Cost of a step: a reduce_scatter of the gradients, most of it beside backward.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.autograd import add_pump
from mpipar.comm import waiting
from mpipar.comm.buckets import MEGABYTE
from mpipar.errors import StateError, explain
from mpipar.parallel.fsdp.gradients import Gradients, Pool
from mpipar.parallel.fsdp.links import Links
from mpipar.parallel.fsdp.unit import Unit, costs_little

BUFFERS = 2  # of units' whole gradients: one is written, one on its way if that costs little
ABORTED = 2  # instead of whether a rank has used a parameter


class Flight:
    """A segment on its way: over the ranks that share a copy, then over those with the same block.

    sent: what travels; out: where the sum arrives; stage: 0 scattered, 1 added up, 2 done; bytes:
    of memory of its own.
    """

    def __init__(self, of: Gradients, which: int, sent: Array) -> None:
        self.of, self.which, self.sent = of, which, sent
        own, whole = of.owns[which], of.unit.cut.ranks == 1
        if own.dtype == sent.dtype and (of.in_place or not whole):
            self.out = own
        else:
            self.out = sent if whole else of.unit.xp.empty(own.shape, sent.dtype)
        self.bytes = sent.nbytes if sent.dtype != of.unit.narrow else 0
        self.bytes += self.out.nbytes if self.out is not own and self.out is not sent else 0
        self.stage = 0
        self.handle: Any = None


class Reducer:
    """Reduces the gradients of all units; see the module.

    base, units: those that the whole model uses, and those that are used one after the other.
    wire: the dtype that gradients travel in, if it is not the one that they are computed in.
    bucket_mb: at most so much is on its way, or one segment.
    """

    def __init__(
        self,
        base: Sequence[Unit],
        units: Sequence[Unit],
        links: Links,
        op: str,
        keeps: bool,
        wire: np.dtype | None,
        bucket_mb: float,
    ) -> None:
        self._capacity = bucket_mb * MEGABYTE
        self._links, self._op, self._wire = links, op, wire
        self.pool = Pool()
        self.grads = [Gradients(unit, keeps) for unit in (*units[::-1], *base[::-1])]
        alone = sum(not grads.keeps for grads in self.grads[len(units) :])
        self._limit = alone + (BUFFERS if costs_little(units, BUFFERS) else 1)
        self._of = {id(grads.unit): grads for grads in self.grads}
        self._queue = [
            (grads, which)
            for grads in self.grads
            for which in reversed(range(len(grads.unit.layout.segments)))
        ]
        self._next = 0  # in the queue
        self._flights: list[Flight] = []
        self._pump: Any = None
        self.quiet = False  # gradients stay on this rank
        self.peak_bytes = 0
        self._heard: set[tuple[int, int]] = set()
        self.handles: list[Any] = []
        for grads in self.grads:
            for number, param in enumerate(grads.unit.params):
                if param.requires_grad:
                    self.listen(grads.unit, number)

    def listen(self, unit: Unit, number: int) -> None:
        """Be told when the gradient of a parameter is complete."""
        if (id(unit), number) not in self._heard:
            self._heard.add((id(unit), number))
            hook = partial(self._complete, self._of[id(unit)], number)
            self.handles.append(unit.params[number].register_hook(hook))

    # -- in backward -----------------------------------------------------------------------------

    def expect(self, unit: Unit) -> None:
        """Backward comes to the unit: let it write the gradients where they are to be."""
        grads = self._of[id(unit)]
        if grads.expected:
            return
        if self._pump is None:
            self._pump = add_pump(self._advance)
        self._open(grads)
        for which, segment in enumerate(unit.layout.segments):
            members = [unit.params[number] for number in segment.members]
            grads.missing[which] = sum(param.requires_grad for param in members)
        grads.expected = True  # from here on it may be launched

    def _open(self, grads: Gradients) -> None:
        full = grads.whole is None and not grads.keeps and self.pool.taken >= self._limit
        while full and not self.pool.free and self._flights:
            self._land(self._flights[0])
            self._launch_complete()
        grads.open(self.pool)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _complete(self, grads: Gradients, number: int, param: Any) -> None:
        """The hook of a parameter: its gradient in this backward is complete."""
        self.expect(grads.unit)
        grads.missing[grads.unit.layout.segment_of[number]] -= 1
        self._advance()

    def _advance(self) -> None:
        """Advance what is in flight, and start what may start."""
        waiting.progress()
        self._fly()
        self._launch_complete()

    def _launch_complete(self) -> None:
        """Start the segments whose turn it is, as many as may be on their way."""
        while self._next < len(self._queue) and not self.quiet:
            grads, which = self._queue[self._next]
            if not grads.expected or grads.missing[which] or self._is_crowded(grads, which):
                return
            self._launch(grads, which)

    def _is_crowded(self, grads: Gradients, which: int) -> bool:
        """Whether a segment must wait: what is on its way needs memory to be received in."""
        if not self._flights:
            return False
        mine = sum(grads.unit.layout.segments[which].sizes) * grads.unit.narrow.itemsize
        return mine + sum(flight.sent.nbytes for flight in self._flights) > self._capacity

    def _fly(self) -> None:
        """Take every flight as far as it has come; blocks are added up in the order of launches."""
        for flight in self._flights:
            if not flight.handle.test():
                if flight.stage == 0:
                    break
            elif flight.stage == 0:
                self._add_up(flight)
            else:
                self._arrive(flight)
        self._flights = [flight for flight in self._flights if flight.stage < 2]

    # -- one segment -----------------------------------------------------------------------------

    def _launch(self, grads: Gradients, which: int) -> None:
        """Start the reduction of the segment whose turn it is."""
        self._next += 1
        unit, segment = grads.unit, grads.unit.layout.segments[which]
        sent = grads.close(segment)
        if self._wire is not None and sent.dtype != self._wire:
            sent = sent.astype(self._wire)
        flight = Flight(grads, which, sent)
        if unit.cut.ranks > 1:
            assert self._links.reduce is not None
            scatter = self._links.reduce.reduce_scatter
            flight.handle = scatter(sent, flight.out, segment.sizes, self._op)
        else:
            self._add_up(flight)
        if flight.stage < 2:
            self._flights.append(flight)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _add_up(self, flight: Flight) -> None:
        """Go on with what is scattered: add up the copies of a block."""
        flight.stage = 1
        link = self._links.all if flight.of.unit.cut.ranks == 1 else self._links.across
        if link is None:
            self._arrive(flight)
        else:
            flight.handle = link.all_reduce(flight.out, self._op)

    def _land(self, flight: Flight) -> None:
        """Wait for a flight, the first of those in the air."""
        while flight.stage < 2:
            flight.handle.wait()
            if flight.stage == 0:
                self._add_up(flight)
            else:
                self._arrive(flight)
        self._flights = [other for other in self._flights if other is not flight]

    def _arrive(self, flight: Flight) -> None:
        """Take the sum to where the shards' gradients are."""
        flight.stage = 2
        own = flight.of.owns[flight.which]
        if flight.out is not own:
            own[...] = flight.out
        flight.of.landed(self.pool)

    # -- the end of backward ---------------------------------------------------------------------

    def end(self) -> None:
        """Backward has ended; without a sync that is all."""
        for grads in self.grads:
            grads.expected = False
        if self._pump is not None:
            self._pump.remove()
            self._pump = None

    def abort(self) -> None:
        """Drop all since the last sync, after a backward that ended with an exception.

        Collective, unless it was quiet.  Ranks may have started different numbers of segments, so
        all start the rest; those that have nothing to drop raise StateError in `sync`.
        """
        self.end()
        if not self.quiet:
            self.sync(aborted=True)
        for grads in self.grads:
            grads.drop(self.pool)

    def sync(self, aborted: bool = False) -> None:
        """Collective: reduce all that is left, and leave the results in the shards.

        Raises StateError if some rank calls it `aborted` and this one does not.
        """
        while self._next < len(self._queue):
            grads, which = self._queue[self._next]
            if not grads.pending:
                self._open(grads)
            while self._is_crowded(grads, which):
                self._land(self._flights[0])
            self._launch(grads, which)
        used = np.array([used for grads in self.grads for used in grads.used], np.uint8)
        if aborted:
            used[...] = ABORTED
        link = self._links.all
        asked = None if link is None else link.all_reduce(used, "max")
        for flight in tuple(self._flights):
            self._land(flight)
        if asked is not None:
            asked.wait()
        self._next = 0
        self._links.settle()
        if ABORTED in used:
            for grads in self.grads:
                grads.drop(self.pool)
            if not aborted:
                rule = "it ended with an exception on another rank"
                fix = "Catch it on every rank, and begin the step anew with zero_grad()"
                raise StateError(explain("backward", "aborted", rule, fix))
            return
        start = 0
        for grads in self.grads:
            grads.hand_out(used[start : start + len(grads.used)].astype(bool).tolist())
            start += len(grads.used)

    def close(self) -> None:
        """Hear no more of gradients."""
        while self.handles:
            self.handles.pop().remove()

    def forget(self) -> None:
        """Drop what was not reduced."""
        for grads in self.grads:
            grads.forget()

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that were not reduced."""
        return any(grads.pending for grads in self.grads)

    @property
    def bytes(self) -> int:
        """Bytes of all gradients, whole or not, and of what is on its way in another dtype."""
        flights = sum(flight.bytes for flight in self._flights)
        return flights + self.pool.bytes + sum(grads.bytes for grads in self.grads)
