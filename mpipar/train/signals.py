"""SIGTERM and SIGUSR1: the run takes its step to the end, saves, and leaves with exit code 0.

    rank 0   step 41 ────── agree ── step 42 ──────── agree ── save, exit 0
    rank 2   step 41 ────── agree ── step 42 ─ USR1 ─ agree ── save, exit 0

A batch system sends one before it ends a job, to all ranks or to one of them; mpiexec may pass it
on too.  The handler only notes it.  The ranks learn of it from a number in the small all-reduce by
which each step judges its loss, so listening costs nothing.  A second signal ends the rank at once,
and with it the job; what comes within SAME seconds is the same one, told twice.
"""

import os
import platform
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.train.launch import rank_of_job

if TYPE_CHECKING:
    from mpipar.parallel.communicator import Communicator

STOP = (signal.SIGTERM, signal.SIGUSR1)
SAME = 1.0  # seconds in which the batch system and mpiexec may tell of one signal


class Signals:
    """Listens while it is entered; asked: the number of the signal that came, or 0."""

    def __init__(self) -> None:
        """Nothing has come."""
        self.asked, self._since = 0, 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        """Listen, where that is possible: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._hear) for number in STOP}
        return self

    def __exit__(self, *error: object) -> None:
        """Stop listening."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def agree(self, world: "Communicator") -> int:
        """Collective: return the number of a signal that a rank has got, or 0."""
        return int(world.all_reduce(np.array([self.asked], np.int32), "max")[0])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = number, now
        elif now - self._since > SAME:
            os.write(sys.stderr.fileno(), f"mpipar: {_second(number)}\n".encode())
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def name_of(number: int) -> str:
    """Return "SIGTERM" for 15."""
    return signal.Signals(number).name


def _second(number: int) -> str:
    """Return what a second signal does, and where."""
    return (
        f"rank {rank_of_job()} on {platform.node()} ends at once: {name_of(number)} came after "
        "a signal that had asked for a stop"
    )
