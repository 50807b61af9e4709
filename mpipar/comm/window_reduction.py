"""One all_reduce in shared memory, in flight: its steps.

The sum is taken in place: the first rank's vector becomes the result, which saves fetching memory
that is only written.  So that rank has twice as many vectors, and fills another one next:

    slots = 1     reduction       1   2   3
                  first rank      B   A   B      fills, and there the result lies
                  other ranks     C   C   C

How far each rank is, the others see in three counters (flags.py), for reduction k:

    start      RELEASED = k - slots, READY = k: the buffer is filled; older results are given up
    add        wait for READY >= k of all; add up the own block
    across     messages to the other nodes, if there are any
    finish     REDUCED = k, after k-1; wait for REDUCED >= k of all: the result is there, the buffer
               is free

The first rank fills for reduction k + 2 slots what held result k: it may once k + slots is finished
and RELEASED >= k of all, as every rank says before READY >= k + slots.

Everything is advanced by `test`, from any wait of this process and from the tape's pump.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpipar.arrays import compute_dtype, is_sixteen_bit
from mpipar.comm import clock, waiting
from mpipar.comm.calls import Call
from mpipar.comm.flags import READY, REDUCED, RELEASED, Flags
from mpipar.comm.flight import TAG
from mpipar.comm.plan import Plan
from mpipar.comm.prepare import fold_of
from mpipar.comm.run import Execution
from mpipar.kernels.reduce import COMBINE, fold
from mpipar.trace import record as trace
from mpipar.trace.record import Label

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup


# Tests set this to a function of (step, number of the reduction) that is called at each step.
pause: Callable[[str, int], None] | None = None


@dataclass
class Work:
    """What one rank does in a reduction.

    operands: its own elements of every vector of the node, in rank order.
    result: where their sum goes, divided by `divisor`; it may be the first operand.
    messages: by which the owners of the same elements on other nodes add theirs, on `across`.
    """

    operands: list[np.ndarray]
    result: np.ndarray
    divisor: float
    messages: Plan | None
    across: MPI.Intracomm
    tag: int


class Reduction:
    """A reduction as a handle: `test()` advances it, `wait()` returns the result."""

    def __init__(
        self,
        group: "ProcessGroup",
        flags: Flags,
        call: Call,
        label: Label,
        number: int,
        work: Work,
        previous: "Reduction | None",
        finish: Callable[[], np.ndarray],
    ) -> None:
        """Prepare reduction `number`; `finish` returns its result, once that is there.

        `label` is what a trace calls it, as the group's latest collective.
        `previous` is the reduction before, if it may still be in flight.
        """
        self._group, self._flags, self._call, self._work = group, flags, call, work
        self.number = number
        self._previous, self._finish = previous, finish
        self._step: Callable[[], bool] = self._add
        self._total = work.result
        self._execution: Execution | None = None
        self.done = self.published = False
        self._label, self._sequence = label, group.sequence
        self._ended: Callable[[], None] | None = None
        if trace.to is not None:
            ended = trace.to.flying(group.flight, label, self._sequence, lambda: None)
            self._ended = ended

    def begin(self, released: int = 0) -> None:
        """Let the others read this rank's buffer; give up results up to number `released`."""
        if released > 0:
            self._at("release")
            self._flags.set(RELEASED, released)
        self._at("ready")
        self._flags.set(READY, self.number)

    def advance(self) -> None:
        """Take the steps that may be taken; those before it are advanced by the caller."""
        while self._step():
            pass

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        if not self.done:
            # The counters alone would not show that a rank has died: let the library look.
            self._group.raw.Iprobe(MPI.ANY_SOURCE, TAG)
            if self._previous is not None:
                self._previous.test()
            self.advance()
        return self.done

    def wait(self) -> np.ndarray:
        """Wait for the result and return it; a second call returns it again."""
        begun = clock.begin()
        if not self.test():
            waiting.wait(self.test, self._group.flight)
        self._group.spent(begun, self._label, self._sequence)
        return self._finish()

    def abandon(self) -> None:
        """Do not advance it any more: its memory is given back."""
        waiting.leave(self.test)

    @property
    def added(self) -> bool:
        """Whether all ranks of the node had started it, and this one has added its block."""
        return self._step != self._add

    @property
    def place(self) -> str:
        """Where it stands, for the watchdog: the step, and the ranks of the node it waits for."""
        if self.done:
            return "done"
        if self._execution is not None and not self._execution.done:
            return f"across the nodes, {self._execution.place}"
        behind = self._flags.behind(REDUCED if self.added else READY, self.number)
        what = "add up their blocks" if self.added else "start it"
        return f"waiting for ranks {behind} of this node to {what}"

    # -- the steps: each says whether the next one may follow at once -----------------------------

    def _at(self, step: str) -> None:
        if pause is not None:
            pause(step, self.number)

    def _add(self) -> bool:
        if not self._flags.reached(READY, self.number):
            return False
        self._at("add")
        work, op = self._work, self._call.op
        if work.messages is None:
            fold(COMBINE[op], work.operands, self._total, work.divisor)
            self._step = self._publish
            return True
        if is_sixteen_bit(self._call.dtype):  # the sums of the nodes stay float32
            self._total = np.empty(self._total.size, compute_dtype(self._call.dtype))
        fold(COMBINE[op], work.operands, self._total)
        self._at("across")
        self._execution = Execution(
            work.across,
            work.messages,
            self._total,
            self._total,
            work.tag,
            fold_of(self._call._replace(dtype=self._total.dtype)),
            1,
            self._group.pool,
            self._group.flight,
            lambda: None,
        )
        self._step = self._across
        return True

    def _across(self) -> bool:
        assert self._execution is not None
        if not self._execution.test():
            return False
        result, divisor = self._work.result, self._work.divisor
        if divisor != 1 or self._total is not result:
            fold(COMBINE[self._call.op], [self._total], result, divisor)
        self._step = self._publish
        return True

    def _publish(self) -> bool:
        """Say that the own block is there.  A counter at k speaks for k-1 too: that is first."""
        if self._previous is not None and not self._previous.published:
            return False
        self._previous = None
        self._at("reduced")
        self._flags.set(REDUCED, self.number)
        self.published = True
        self._step = self._end
        return True

    def _end(self) -> bool:
        if self._flags.reached(REDUCED, self.number):
            self._at("done")
            self.done = True
            waiting.leave(self.test)
            if self._ended is not None:
                self._ended()
        return False
