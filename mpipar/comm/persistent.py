"""Small plans on prepared requests: blocking, used again and again.

A `Persistent` has buffers of its own and makes its requests once (MPI's persistent requests);
starting one costs a third of posting one, which is most of what a call of a few bytes costs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm import run as runner
from mpipar.comm import waiting
from mpipar.comm.plan import OUTPUT, SPACES, Fold, Message, Plan
from mpipar.comm.run import FoldFunction


class Persistent:
    """A plan on its own small buffers, with persistent requests; blocking, used again and again."""

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        dtype: np.dtype,
        tag: int,
        fold: FoldFunction,
        divisor: int,
        watchdog: waiting.Watchdog,
    ) -> None:
        self._spaces = [np.zeros(plan.sizes[space], dtype) for space in range(SPACES)]
        self._watchdog, self._divisor = watchdog, divisor
        self._divides_at_end = divisor != 1 and not plan.divides
        self.input, self.output = self._spaces[0], self._spaces[1]
        self._requests: list[MPI.Prequest] = []
        in_folds = divisor if plan.divides else 1
        self._copies = [self._bind(f, fold, 1) for f in plan.copies]
        self._steps = []
        self._peers = [
            [m.peer for m in step.early_receives + step.late_receives]
            + [m.peer for m in step.early_sends + step.late_sends]
            for step in plan.steps
        ]
        send = comm.Ssend_init if runner.synchronous_sends else comm.Send_init
        for step in plan.steps:
            before = [self._bind(f, fold, 1) for f in step.packs]
            receives = [
                comm.Recv_init(self._triple(m), m.peer, tag)
                for m in step.early_receives + step.late_receives
            ]
            sends = [send(self._triple(m), m.peer, tag) for m in step.early_sends + step.late_sends]
            requests: list[Any] = [*receives, *sends]
            self._requests += requests
            after = [
                self._bind(f, fold, in_folds if len(f.operands) > 1 else 1) for f in step.folds
            ]
            starts = tuple(request.Start for request in requests)
            tests = tuple(request.Test for request in requests)
            self._steps.append((tuple(before), starts, tests, tuple(after)))
        self.last = self._last_addition(plan, fold, divisor)

    def run(self) -> None:
        """Take `input` through the schedule to `output`, waiting for the messages."""
        self.run_to_last()
        if self.last is not None:
            self.last(out=self.output)

    def run_to_last(self) -> None:
        """The same up to `last`, if there is one: the addition that makes all of the output."""
        for call, arguments in self._copies:
            call(*arguments)
        for before, starts, tests, after in self._steps:
            for call, arguments in before:
                call(*arguments)
            for start in starts:
                start()
            for test in tests:
                if not (test() or test() or test()):  # the peer is often just as far
                    self._watchdog.running = self
                    waiting.wait(test, self._watchdog)
            for call, arguments in after:
                call(*arguments)
        if self._divides_at_end:
            np.divide(self.output, self._divisor, out=self.output)

    def _last_addition(self, plan: Plan, fold: FoldFunction, divisor: int) -> Callable | None:
        """Take the last addition out of the steps if it makes all of the output by itself."""
        combine = getattr(fold, "combine", None)
        folds = plan.steps[-1].folds if plan.steps else []
        if combine is None or divisor != 1 or len(folds) != 1 or len(folds[0].operands) != 2:
            return None
        if self._array(folds[0].out).size != self.output.size or folds[0].out.space != OUTPUT:
            return None
        before, starts, tests, _ = self._steps[-1]
        self._steps[-1] = (before, starts, tests, ())
        return partial(combine, *(self._array(place) for place in folds[0].operands))

    @property
    def waits_for(self) -> list[int]:
        """The ranks whose messages of this round have not come, or not gone."""
        number = self._round()
        if number is None:
            return []
        tests = self._steps[number][2]
        return sorted({p for p, t in zip(self._peers[number], tests, strict=True) if not t()})

    @property
    def place(self) -> str:
        """Where it stands, for the watchdog: the round and the peers it waits for."""
        number = self._round()
        if number is None:
            return "done"
        return f"round {number} of {len(self._steps)}, waiting for {self.waits_for}"

    def _round(self) -> int | None:
        """Return the first round that is not complete; a request that was never started is."""
        unfinished = (i for i, step in enumerate(self._steps) if not all(t() for t in step[2]))
        return next(unfinished, None)

    def free(self) -> None:
        """Free the requests."""
        for request in self._requests:
            request.Free()
        self._requests, self._steps = [], []

    def _array(self, place: tuple[int, int, int]) -> np.ndarray:
        space, start, stop = place
        return self._spaces[space][start:stop]

    def _triple(self, message: Message) -> list:
        data = self._array(message.place).view(np.uint8)
        return [data, data.size, MPI.BYTE]

    def _bind(self, f: Fold, fold: FoldFunction, divisor: int) -> tuple[Callable, tuple]:
        out, operands = self._array(f.out), [self._array(place) for place in f.operands]
        combine = getattr(fold, "combine", None)
        if combine is not None and len(operands) == 2 and divisor == 1:
            return partial(combine, *operands, out=out), ()
        return fold, (operands, out, divisor)
