"""Trace: when which rank computed, communicated and waited, in one picture of all ranks.

    with mp.Trace("traces", mesh.world) as trace:
        for step in range(1, 11):
            with trace.step(step):
                with trace.phase("forward"):
                    loss = ...

    rank 0   rank-00000.jsonl ─┐
    rank 1   rank-00001.jsonl ─┴─ at the end ─ trace.json: ui.perfetto.dev, mpipar trace

Each rank writes what it did to a file of its own as it goes (mpipar/trace/parts.py), so a job that
dies leaves it, and `mpipar trace DIRECTORY` makes the picture of that.  All times are on rank 0's
clock, which each node compares with its own at the start and at the end.

Cost: some microseconds for each call that is recorded, most of them when its row is written at the
end of a step, which the trace shows; where there is no Trace, a call asks one variable.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mpipar.comm.agreement import agree
from mpipar.comm.clocks import offsets
from mpipar.errors import ConfigError, MpiparError, StateError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.trace import chrome, record
from mpipar.trace.parts import PATTERN, Writer, path_of
from mpipar.trace.summary import summarise

MOST = 400_000  # spans of all ranks together: what a browser shows well


class Trace:
    """Records what the ranks of a communicator do while it is entered.

    directory: where the files go.  path: of the file of all ranks, `directory`/trace.json, which is
    there when the block has ended.  summary: what it says in a few lines, on rank 0 then; else "".
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        comm: Communicator,
        steps: tuple[int, int] | None = None,
        place: str = "",
    ) -> None:
        """Collective: make the folder, if need be, and a file in it for each rank.

        The folder is one that all ranks see; an older trace in it is overwritten.
        comm: of all ranks that are recorded.  steps: first and last of those that are recorded (see
        `step`); None: everything is.  place: where this rank is in the mesh, as in "dp 1 tp 0".

        Of all ranks together 400,000 spans are kept, and what comes later is counted only.
        Raises ConfigError on every rank if a file cannot be written, StateError in another Trace.
        """
        self.directory, self.summary = Path(directory), ""
        self._comm, self._steps, self._closed = comm, steps, False
        self._together(self._begin)
        ahead, origin = self._clock(time.perf_counter())
        header: dict[str, Any] = {"rank": comm.global_rank, "host": platform.node()}
        header |= {"pid": os.getpid(), "place": place, "started": time.time()}
        header |= {"origin": origin, "clock": [time.perf_counter(), ahead]}
        self._writer = self._together(
            lambda: Writer(path_of(self.directory, comm.global_rank), header)
        )
        self._together(self._seen)
        self._recorder = record.Recorder(self._writer.write, max(1000, MOST // comm.size))

    @property
    def path(self) -> Path:
        """The file of all ranks."""
        return self.directory / chrome.NAME

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record this block as a step."""
        first, last = self._steps or (number, number)
        if self._steps is not None:
            record.to = self._recorder if first <= number <= last else None
        start = time.perf_counter()
        yield
        if record.to is self._recorder:
            self._recorder.span("step", f"step {number}", start)
        if self._steps is not None and number >= last:
            record.to = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record this block as a part of a step: forward, backward, ..."""
        return record.phase(name)

    def __enter__(self) -> "Trace":
        """Begin to record."""
        if self._steps is None:
            record.to = self._recorder
        return self

    def close(self) -> None:
        """Collective: end the recording, and let rank 0 make one file of all; as the block's end.

        Raises ConfigError on every rank if something could not be written.
        """
        if self._closed:
            return
        self._stop()
        ahead, _ = self._clock()
        end = ("clock", time.perf_counter(), ahead), ("end", self._recorder.lost)
        self._writer.write(end)
        self._writer.close()
        self._together(self._written)
        self._together(self._merge)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it; after an error, to which the others may not come, leave this rank's file."""
        if error is None:
            self.close()
        elif not self._closed:
            self._stop()
            self._writer.close()

    def _stop(self) -> None:
        self._closed, record.to = True, None
        self._recorder.flush()

    # -- what the ranks do together ---------------------------------------------------------------

    def _together(self, action: Callable[[], Any]) -> Any:
        """Act on every rank; if one fails, all raise the error of the lowest."""
        value, problem = None, None
        try:
            value = action()
        except MpiparError as error:
            problem = error
        except OSError as error:
            problem = self._refused(f"nothing can be written there ({error.strerror})")
        agree(self._comm.process_group, "Trace", {}, problem=problem)
        return value

    def _refused(self, rule: str, fix: str = "Name another folder") -> ConfigError:
        return ConfigError(explain("trace", str(self.directory), rule, fix))

    def _begin(self) -> None:
        """Check that this process records nothing yet; rank 0 makes the folder, and empties it."""
        if record.to is not None:
            rule, fix = "another trace is being taken", "Leave its block first"
            raise StateError(explain("Trace", str(self.directory), rule, fix))
        if self._comm.rank != 0:
            return
        if self.directory.exists() and not self.directory.is_dir():
            raise self._refused("it is a file")
        self.directory.mkdir(parents=True, exist_ok=True)
        for old in [*self.directory.glob(PATTERN), self.path]:
            old.unlink(missing_ok=True)

    def _seen(self) -> None:
        """Check that rank 0 sees the files of all ranks."""
        if self._comm.rank == 0:
            ranks = self._comm.ranks
            missing = [str(r) for r in ranks if not path_of(self.directory, r).exists()]
            if missing:
                rule = f"rank 0 does not see what the ranks {', '.join(missing)} write there"
                raise self._refused(rule, "Name a folder that all nodes share")

    def _clock(self, origin: float = 0.0) -> tuple[float, float]:
        """Return how much this rank's clock is ahead of rank 0's, and rank 0's `origin`."""
        group = self._comm.process_group
        node_of = group.nodes.node_of
        leaders = [node_of.index(node) for node in range(group.nodes.count)]
        found = offsets(group.raw, leaders, time.perf_counter)
        found, origin = group.raw.bcast((found, origin), root=0)
        return found[node_of[group.rank]][0], origin

    def _written(self) -> None:
        if self._writer.failure:
            fix = f"Make room; mpipar trace {self.directory} shows what there is"
            raise self._refused(f"it could not all be written ({self._writer.failure})", fix)

    def _merge(self) -> None:
        """Let rank 0 make one file of all ranks' and say what is in it."""
        if self._comm.rank != 0:
            return
        chrome.merge(self.directory)
        self.summary = summarise(self.path).text()
        for rank in self._comm.ranks:
            path_of(self.directory, rank).unlink(missing_ok=True)
