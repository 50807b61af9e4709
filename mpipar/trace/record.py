"""What a process tells of its time while a trace is taken, as rows that go to its file.

    communication   a call that the program is inside of, a wait within one, and what is in flight
    computation     steps, phases of them (forward, backward, ...), actions of a pipeline

    program   ──call──┐          ┌──forward──┐┌──call: wait for it──┐
    rows      [ call ]            [  phase  ]  [ wait ][   call   ]
              [        flight: from its start to its completion   ]

Where nothing is traced, `to` is None, and who would tell asks just that.  Times are seconds of
time.perf_counter; parts.py puts them on the clock of all ranks.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

FLUSH = 20_000  # rows that are kept in memory at most
PERIOD = 1.0  # seconds after which a step's end writes them

Row = tuple[Any, ...]


class Label(NamedTuple):
    """What a call of a communicator is: all_reduce/ring, its bytes, and all of it in words."""

    name: str
    bytes: int
    details: str


class Channel(Protocol):
    """A communicator, as a trace sees it: a number that is its own in this process."""

    number: int

    def members(self) -> tuple[str, tuple[int, ...]]:
        """Return its name, and the ranks of the job that are in it."""


class Recorder:
    """Collects rows and hands them to `write`; the thread that made it is the program's.

    lost: rows that were told after `most`, and are not kept.
    """

    def __init__(self, write: Callable[[list[Row]], None], most: int) -> None:
        """Take where rows go, and how many there may be."""
        self._write, self._most = write, most
        self._rows: list[Row] = []
        self._labels: dict[Label, int] = {}
        self._channels: set[int] = set()
        self._pipelines: set[int] = set()
        self._thread, self._written = threading.get_ident(), time.perf_counter()
        self.count = self.lost = 0

    def call(
        self, channel: Channel, label: Label, sequence: int, start: float, seconds: float
    ) -> None:
        """Tell of a call that the program was inside of; sequence: that of a collective, or 0."""
        kind = "call" if threading.get_ident() == self._thread else "flight"
        self._on_channel(kind, start, start + seconds, channel, label, sequence)

    def wait(self, channel: Channel, start: float, seconds: float) -> None:
        """Tell of the part of a call in which the program could only wait."""
        if threading.get_ident() == self._thread:
            self._introduce(channel)
            self._add(("wait", start, start + seconds, channel.number))

    def flying(
        self, channel: Channel, label: Label, sequence: int, finish: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return `finish`, to be called on completion, which then tells of what was in flight."""
        start = time.perf_counter()

        def finished() -> Any:
            result = finish()
            if to is self:
                self._on_channel("flight", start, time.perf_counter(), channel, label, sequence)
            return result

        return finished

    def span(self, kind: str, name: str, start: float) -> None:
        """Tell of a step or phase that ends now."""
        stop = time.perf_counter()
        self._add((kind, start, stop, name))
        if kind == "step" and stop - self._written > PERIOD:
            self.flush()

    def action(self, channel: Channel, name: str, start: float, stop: float) -> None:
        """Tell of an action of the pipeline on a communicator."""
        self._introduce(channel)
        self._add(("action", start, stop, channel.number, name))

    def pipeline(self, channel: Channel, name: str, csv: Callable[[], str]) -> None:
        """Tell of the schedule by which a communicator's actions run, once."""
        if channel.number not in self._pipelines:
            self._pipelines.add(channel.number)
            self._introduce(channel)
            self._rows.append(("pipeline", channel.number, name, csv()))

    def flush(self) -> None:
        """Write what has been collected; how long that took is told too."""
        start = self._written = time.perf_counter()
        rows = self._rows[:]
        del self._rows[: len(rows)]
        self._write(rows)
        self._add(("phase", start, time.perf_counter(), "write trace"))

    def _add(self, row: Row) -> None:
        if self.count >= self._most:
            self.lost += 1
            return
        self.count += 1
        self._rows.append(row)
        if len(self._rows) >= FLUSH:
            self.flush()

    def _on_channel(
        self, kind: str, start: float, stop: float, channel: Channel, label: Label, sequence: int
    ) -> None:
        self._introduce(channel)
        number = self._labels.get(label)
        if number is None:
            number = self._labels[label] = len(self._labels)
            self._rows.append(("label", number, *label))
        self._add((kind, start, stop, channel.number, number, sequence))

    def _introduce(self, channel: Channel) -> None:
        if channel.number not in self._channels:
            self._channels.add(channel.number)
            name, ranks = channel.members()
            self._rows.append(("channel", channel.number, name, min(ranks), len(ranks)))


to: Recorder | None = None  # who is told, if a trace is taken


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Let a trace show this block of a step under a name; does nothing where none is taken."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if to is not None:
            to.span("phase", name, start)
