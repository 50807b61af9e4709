"""A thread that ends the whole MPI job when a test takes too long, and says who hangs where.

The main thread may sit inside an MPI call for ever, so the time limit lives in a thread of its own.
The rank that ends the job asks every other rank of this host for its stacks by a signal, which
faulthandler answers even from within C code, and prints them labelled by rank.
"""

import contextlib
import faulthandler
import itertools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGUSR1
HARNESS = ("/_pytest/", "/pluggy/", str(Path(__file__).parent))  # left out of the stacks shown
PARTING = 10.0  # seconds that ranks wait for each other at the end
BACKSTOP = 30.0  # seconds after the limit until faulthandler ends a process that holds the GIL


class Watchdog:
    """Ends the job at a deadline: `arm` before a test, `hasten` when it failed here, `disarm`."""

    def __init__(self, world: Any, notes: Callable[[], str]) -> None:
        self.world = world
        self.notes = notes  # what else to say when the job ends, for example earlier failures
        self.stderr = os.dup(2)  # pytest redirects descriptor 2 while a test runs
        folder = tempfile.mkdtemp(prefix="mpipar-tests-") if world.rank == 0 else None
        self.folder = Path(world.bcast(folder))
        self.peers = world.allgather((socket.gethostname(), os.getpid()))
        self.stack = self._stack_path(world.rank).open("w")
        faulthandler.register(STACK_SIGNAL, file=self.stack, all_threads=True)
        self.changed = threading.Condition()
        self.deadline: float | None = None
        self.test = ""
        self.reason = ""
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    def arm(self, test: str, seconds: float) -> None:
        """Give `test` this many seconds."""
        self._set(test, seconds, f"took longer than its limit of {seconds:g} s")
        faulthandler.dump_traceback_later(seconds + BACKSTOP, exit=True, file=self.stderr)

    def hasten(self, seconds: float, error: str) -> None:
        """Leave the other ranks `seconds` to finish the test that failed on this one."""
        with self.changed:
            if self.deadline is not None and time.monotonic() + seconds < self.deadline:
                reason = f"failed here, and other ranks did not finish it in {seconds:g} s\n{error}"
                self._set(self.test, seconds, reason)

    def disarm(self) -> None:
        """No limit until the next `arm`."""
        faulthandler.cancel_dump_traceback_later()
        with self.changed:
            self.deadline = None
            self.changed.notify()

    def close(self) -> None:
        """Remove the folder of this run, once no rank tidies its own place in it any more."""
        self.disarm()
        faulthandler.unregister(STACK_SIGNAL)
        self.stack.close()
        others, end = self.world.Ibarrier(), time.monotonic() + PARTING
        while not others.Test() and time.monotonic() < end:
            time.sleep(0.005)
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def abort(self, test: str, reason: str) -> None:
        """Say what happened, with the stacks of all ranks, and end the job; does not return."""
        first = self._first()
        if first:
            rank, size = self.world.rank, self.world.size
            start = f"\n===== rank {rank} of {size}: {test} {reason}"
            end = f"===== rank {rank} ends the job because of {test}\n"
            text = "\n".join(filter(None, [start, self.notes(), *self._stacks(), end]))
            os.write(self.stderr, text.encode())
            shutil.rmtree(self.folder, ignore_errors=True)
        time.sleep(1 if first else 5)
        self.world.Abort(1)

    def _set(self, test: str, seconds: float, reason: str) -> None:
        with self.changed:
            self.test, self.reason = test, reason
            self.deadline = time.monotonic() + seconds
            self.changed.notify()

    def _watch(self) -> None:
        with self.changed:
            while self.deadline is None or time.monotonic() < self.deadline:
                left = None if self.deadline is None else self.deadline - time.monotonic()
                self.changed.wait(left)
            test, reason = self.test, self.reason
        self.abort(test, reason)

    def _first(self) -> bool:
        """Whether this rank is the first to end the job: the others then stay silent."""
        try:
            (self.folder / "owner").touch(exist_ok=False)
        except OSError:
            return False
        return True

    def _stack_path(self, rank: int) -> Path:
        return self.folder / f"stack-{rank}"

    def _stacks(self) -> list[str]:
        here = socket.gethostname()
        for host, pid in self.peers:
            if host == here:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        time.sleep(0.5)
        return [
            f"----- stacks of rank {rank}:\n{_shorten(self._stack_path(rank).read_text())}"
            for rank, (host, _) in enumerate(self.peers)
            if host == here
        ]


def _shorten(stacks: str) -> str:
    """Cut each thread's stack where pytest begins, and leave out the thread of this module."""
    lines = []
    for part in stacks.split("\n\n"):
        if f'"{__file__}"' in part and "in _watch" in part:
            continue
        header, *frames = part.splitlines()
        own = itertools.takewhile(lambda line: not any(name in line for name in HARNESS), frames)
        lines += [header, *(list(own) or ["  (not inside a test)"])]
    return "\n".join(lines)
