"""Runs the peer of `mpipar bench train`: a process of PyTorch beside each rank.

    rank 0   ours ours ours |  (waits)  | ours ...        step   step   step  together, over MPI
    peer 0     (asleep)     | s s s s s | (asleep)        step   step   step  together, over gloo

The process is started once and answers the lines of its input; between them it sleeps in a read,
and while it works its rank sleeps.  So both are measured in turns on the same cores, and neither is
started anew.
"""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from mpipar.bench import torch_gpt
from mpipar.errors import ConfigError, explain

SECONDS = 300.0  # for an answer
INSTALL = "pip install torch"


class Answer(NamedTuple):
    """The seconds of each step on this rank, and the peer's peak memory so far."""

    seconds: list[float]
    rss_mb: float


def check(peer: str | None) -> None:
    """Raise ConfigError if the peer that was asked for is not installed."""
    if peer is not None and importlib.util.find_spec(peer) is None:
        fix = f"Run {INSTALL}, or leave out --peer"
        raise ConfigError(explain("peer", peer, "it must be installed on every rank", fix))


class Peer:
    """The process beside this rank; a context manager."""

    def __init__(self, settings: torch_gpt.Settings) -> None:
        """Start it; the others of the job must be started too before it is ready."""
        threads = str(settings["threads"])
        self._limit = SECONDS
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(torch_gpt.__file__)), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        self._unread = b""

    def parameters(self) -> int:
        """Wait until it is ready; return the number of its model's parameters."""
        return int(self._answer()["parameters"])

    def run(self, steps: int) -> Answer:
        """Let it take steps, and sleep meanwhile."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n".encode())
            self._process.stdin.flush()
        except OSError:  # it has ended
            raise self._failure() from None
        return Answer(**self._answer())

    def close(self) -> None:
        """End it; twice is harmless."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended, and a line was not read
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # its own peers may be gone
            self._process.kill()
        self.close()

    def _answer(self) -> dict[str, Any]:
        """Return the next line of its output; raise ConfigError if it ends or is silent."""
        assert self._process.stdout is not None
        output, end = self._process.stdout.fileno(), time.monotonic() + self._limit
        while b"\n" not in self._unread:
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            more = os.read(output, 1 << 16) if ready else b""
            if not more:
                raise self._failure()
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _failure(self) -> ConfigError:
        """Return the error that says how it ended."""
        silent = self._process.poll() is None
        if silent:
            try:
                self._process.wait(2)  # its output may be closed a moment before it has ended
                silent = False
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines() or [""]
        how = f"gave no answer in {self._limit:g} s" if silent else "ended"
        rule = f"its process must answer, but {how}: {said[-1]}"
        return ConfigError(explain("peer", "torch", rule, f"Try {INSTALL} again, or leave it out"))
