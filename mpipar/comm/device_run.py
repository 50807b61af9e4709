"""Executes compiled schedules on device arrays: the same plans, other messages and additions.

What `run.py` waits for is asked here of events as well as of requests (see staging.py).  Additions
are kernels on the caller's stream, which sees the result when the handle is done: nothing waits for
the stream itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import Array, module
from mpipar.comm import run, waiting
from mpipar.comm.device import Lane
from mpipar.comm.plan import Fold, Message
from mpipar.comm.run import Execution, FoldFunction, Requests, trouble
from mpipar.comm.staging import Transfers
from mpipar.kernels.reduce import COMBINE, fold


class DeviceExecution(Execution):
    """One collective in flight on device arrays."""

    def __init__(self, comm: MPI.Comm, lane: Lane, tag: int, **how: Any) -> None:
        self._transfers = Transfers(comm, tag, lane)
        self._stream = module("cuda").cuda.get_current_stream()
        super().__init__(comm, tag=tag, **how)

    def test(self) -> bool:
        """Advance as far as possible without waiting; say whether the result is there."""
        with self._stream:
            return super().test()

    @property
    def waits_for(self) -> list[int]:
        """The ranks whose messages of this round have not come."""
        return [] if self.done else self._transfers.froms

    def _take_scratch(self, nbytes: int) -> Array:
        return module("cuda").empty(nbytes, np.uint8)

    def _give_back_scratch(self, buffer: Array) -> None:
        """CuPy's pool has it as soon as nothing refers to it."""

    def _run_folds(self, folds: list[Fold], divisor: int) -> None:
        with self._stream:
            super()._run_folds(folds, divisor)

    def _receive(self, message: Message) -> None:
        self._transfers.receive(self._message(message), message.peer, 0)

    def _send(self, messages: list[Message], number: int) -> None:
        post = self.comm.Issend if run.synchronous_sends else self.comm.Isend
        for message in messages:
            self._transfers.send(self._message(message), message.peer, number, post)

    def _sent(self, last: int) -> bool:
        return self._transfers.sent(last)

    def _arrived(self) -> bool:
        try:
            return self._transfers.arrived(0)
        except MPI.Exception as error:
            waiting.leave(self.test)
            raise trouble(error, (), f"{self._watchdog} ({self.place})") from error
        except BaseException:
            waiting.leave(self.test)
            raise


class DeviceRequests(Requests):
    """send, recv and sendrecv in a group of GPUs, as a handle: number `number` of its messages."""

    def __init__(
        self,
        transfers: Transfers,
        number: int,
        watchdog: Any,
        finish: Callable[[], Any],
        place: str,
    ) -> None:
        super().__init__([], watchdog, finish, place)
        self._transfers, self._number = transfers, number

    def _complete(self) -> bool:
        arrived = self._transfers.arrived(self._number)
        return self._transfers.sent(self._number) and arrived


def device_fold(op: str | None) -> FoldFunction:
    """Return the addition of device arrays, in the order of the operands."""
    return partial(fold, COMBINE[op or "sum"])
