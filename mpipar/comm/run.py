"""Executes compiled schedules: the only place that posts a collective's Isend and Irecv.

`Execution` runs any plan on the caller's arrays, as a handle that is advanced by `test`.  (Small
plans run on prepared requests: persistent.py.)

Messages are matched by tag and by MPI's non-overtaking rule; the tag comes from the communicator's
sequence number, so that two handles in flight never mix.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm import buffers, waiting
from mpipar.comm.plan import KEEP, Fold, Message, Plan, Step
from mpipar.errors import BufferMismatchError, MpiparError, PeerError

# Tests set this to force every send to wait for its receive (MPI_Issend).
synchronous_sends = os.environ.get("MPIPAR_SYNCHRONOUS_SENDS", "0") == "1"

FoldFunction = Callable[[Sequence[np.ndarray], np.ndarray, int], None]


class ScratchPool:
    """Keeps the scratch memory of finished executions for the next one of the same group.

    bytes: of all buffers, in use or not.
    """

    def __init__(self, keep: int = 4) -> None:
        self._free: list[np.ndarray] = []
        self._keep = keep
        self.bytes = 0

    def take(self, nbytes: int) -> np.ndarray:
        """Return at least `nbytes` bytes of uint8, 64-byte aligned pages as the allocator gives."""
        fits = [i for i, buffer in enumerate(self._free) if buffer.size >= nbytes]
        if fits:
            return self._free.pop(min(fits, key=lambda i: self._free[i].size))
        self.bytes += nbytes
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffer: np.ndarray) -> None:
        """Take a buffer back; the smallest are let go."""
        self._free.append(buffer)
        if len(self._free) > self._keep:
            self._free.sort(key=lambda b: b.size)
            self.bytes -= self._free.pop(0).size

    def clear(self) -> None:
        """Let go of all buffers that are not in use."""
        self.bytes -= sum(buffer.size for buffer in self._free)
        self._free.clear()


class Execution:
    """One collective in flight: a plan on real arrays.

    `test()` advances it and says whether it is done; `wait()` returns the result.  `finish` turns
    the output into that result and runs once.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        source: np.ndarray,
        output: np.ndarray,
        tag: int,
        fold: FoldFunction,
        divisor: int,
        pool: ScratchPool,
        watchdog: waiting.Watchdog,
        finish: Callable[[], Any],
        piece_bytes: int = 0,
    ) -> None:
        self.comm, self._plan, self._tag, self._fold = comm, plan, tag, fold
        self._piece_bytes = piece_bytes
        self._divisor = divisor
        self._divisor_in_folds = divisor if plan.divides else 1
        self._pool, self._watchdog, self._finish = pool, watchdog, finish
        itemsize = output.dtype.itemsize
        self._itemsize = itemsize
        self._held = [self._take_scratch(n * itemsize) for n in plan.sizes[KEEP:]]
        scratch = [
            held[: n * itemsize].view(output.dtype)
            for held, n in zip(self._held, plan.sizes[KEEP:], strict=True)
        ]
        self._spaces = [source, output, *scratch]
        self._bytes = [space.view(np.uint8) for space in self._spaces]
        self._receives: list[MPI.Request] = []  # of this step
        self._statuses: list[MPI.Status] = []  # filled and lengthened by Testall
        self._expected: list[tuple[int, int]] = []  # (peer, bytes) of the receives
        self._sends: deque[tuple[int, list[MPI.Request]]] = deque()  # (step, its requests)
        self._number = 0
        self._result: Any = None
        self.done = False
        self._start()

    # -- the handle ------------------------------------------------------------------------------

    def test(self) -> bool:
        """Advance as far as possible without waiting; say whether the result is there."""
        steps = self._plan.steps
        while not self.done:
            if not self._arrived():
                return False
            following = steps[self._number + 1 : self._number + 2]
            needed = following[0].post_after if following else self._number
            if not self._sent(max(needed, steps[self._number].fold_after)):
                return False
            self._next()
        return True

    def wait(self) -> Any:
        """Wait for the result and return it.  Raises what went wrong with the messages."""
        if not self.done and not self.test():
            waiting.wait(self.test, self._watchdog)
        return self._result

    @property
    def place(self) -> str:
        """Where it stands, for the watchdog: the round and the peers it waits for."""
        if self.done:
            return "done"
        step = self._plan.steps[self._number]
        froms = sorted({m.peer for m in step.early_receives + step.late_receives})
        tos = sorted({m.peer for m in step.early_sends + step.late_sends})
        rounds = len(self._plan.steps)
        return f"round {self._number} of {rounds}, receiving from {froms}, sending to {tos}"

    @property
    def waits_for(self) -> list[int]:
        """The ranks whose messages of this round have not come, or, if all have, not gone."""
        if self.done:
            return []
        step = self._plan.steps[self._number]
        sends = {m.peer for m in step.early_sends + step.late_sends}
        return sorted({peer for peer, _ in self._expected} or sends)

    # -- how it goes on --------------------------------------------------------------------------

    def _start(self) -> None:
        steps = self._plan.steps
        if steps:
            self._post_early(steps[0], 0)
            self._post_late(steps[0], 0)
        self._run_folds(self._plan.copies, 1)
        if not steps:
            self._end()
        else:
            self.test()

    def _next(self) -> None:
        """The step's receives are there: post the next one's around this one's additions."""
        steps, number = self._plan.steps, self._number
        if number + 1 < len(steps):
            self._post_early(steps[number + 1], number + 1)
            self._run_folds(steps[number].folds, self._divisor_in_folds)
            self._post_late(steps[number + 1], number + 1)
            self._number = number + 1
        else:
            self._run_folds(steps[number].folds, self._divisor_in_folds)
            self._end()

    def _end(self) -> None:
        if self._divisor != self._divisor_in_folds:
            output = self._spaces[1]
            np.divide(output, self._divisor, out=output)
        self._result = self._finish()
        self.done = True
        for buffer in self._held:
            self._give_back_scratch(buffer)
        waiting.leave(self.test)
        self._spaces, self._bytes, self._held = [], [], []

    def _take_scratch(self, nbytes: int) -> np.ndarray:
        return self._pool.take(nbytes)

    def _give_back_scratch(self, buffer: np.ndarray) -> None:
        self._pool.give_back(buffer)

    def _run_folds(self, folds: list[Fold], divisor: int) -> None:
        spaces = self._spaces
        for out, operands in folds:
            self._fold(
                [spaces[space][start:stop] for space, start, stop in operands],
                spaces[out.space][out.start : out.stop],
                divisor if len(operands) > 1 else 1,
            )

    def _post_early(self, step: Step, number: int) -> None:
        for message in step.early_receives:
            self._receive(message)
        self._send(step.early_sends, number)

    def _post_late(self, step: Step, number: int) -> None:
        for message in step.late_receives:
            self._receive(message)
        self._run_folds(step.packs, 1)
        self._send(step.late_sends, number)

    def _message(self, message: Message) -> np.ndarray:
        _peer, (space, start, stop) = message
        return self._bytes[space][start * self._itemsize : stop * self._itemsize]

    def _receive(self, message: Message) -> None:
        for triple in buffers.pieces(self._message(message), self._piece_bytes):
            self._receives.append(self.comm.Irecv(triple, message.peer, self._tag))
            self._expected.append((message.peer, triple[1]))

    def _send(self, messages: list[Message], number: int) -> None:
        post = self.comm.Issend if synchronous_sends else self.comm.Isend
        requests = [
            post(triple, message.peer, self._tag)
            for message in messages
            for triple in buffers.pieces(self._message(message), self._piece_bytes)
        ]
        if requests:
            self._sends.append((number, requests))

    def _sent(self, last: int) -> bool:
        """Say whether the sends of the steps up to `last` are complete."""
        while self._sends and self._sends[0][0] <= last:
            if not MPI.Request.Testall(self._sends[0][1]):
                return False
            self._sends.popleft()
        return True

    def _arrived(self) -> bool:
        """Test the receives of the step; check what was received."""
        if not self._receives:
            return True
        try:
            if not MPI.Request.Testall(self._receives, self._statuses):
                return False
        except MPI.Exception as error:
            waiting.leave(self.test)
            raise trouble(error, self._statuses, f"{self._watchdog} ({self.place})") from error
        for status, (peer, expected) in zip(self._statuses, self._expected, strict=False):
            if status.count != expected:
                waiting.leave(self.test)
                raise BufferMismatchError(
                    f"rank {peer} sent {status.count} bytes where {expected} were expected, "
                    f"in {self._watchdog} ({self.place})"
                )
        self._receives.clear()
        self._expected.clear()
        return True


class Requests:
    """Requests posted elsewhere (the library's collectives, send and recv), as a handle."""

    def __init__(
        self,
        requests: list[MPI.Request],
        watchdog: waiting.Watchdog,
        finish: Callable[[], Any],
        place: str,
        expected: Sequence[int] = (),
    ) -> None:
        self._requests, self._watchdog, self._finish = requests, watchdog, finish
        self._expected, self._statuses = expected, list[MPI.Status]()
        self._result: Any = None
        self.place = place
        self.done = False

    def test(self) -> bool:
        """Say whether all requests are complete.

        Raises BufferMismatchError if a message is longer or shorter than expected.
        """
        if self.done:
            return True
        try:
            if not self._complete():
                return False
        except MPI.Exception as error:
            waiting.leave(self.test)
            raise trouble(error, self._statuses, self.place) from error
        waiting.leave(self.test)
        for status, expected in zip(self._statuses, self._expected, strict=False):
            if status.count != expected:
                raise BufferMismatchError(
                    f"{self.place}: {status.count} bytes came where {expected} were expected"
                )
        self._result = self._finish()
        self.done = True
        return True

    def _complete(self) -> bool:
        return bool(MPI.Request.Testall(self._requests, self._statuses))

    def wait(self) -> Any:
        """Wait for the result and return it."""
        if not self.test():
            waiting.wait(self.test, self._watchdog)
        return self._result


def trouble(error: MPI.Exception, statuses: Sequence[MPI.Status], place: str) -> MpiparError:
    """Return what to raise for an error of MPI: a message too long, or a peer that is gone."""
    codes = {status.error for status in statuses} | {error.Get_error_class()}
    if MPI.ERR_TRUNCATE in {MPI.Get_error_class(code) for code in codes if code > 0}:
        return BufferMismatchError(f"a message is longer than its buffer, in {place}: {error}")
    return PeerError(f"MPI failed in {place}; a peer may be gone: {error}")
