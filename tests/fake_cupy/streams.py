"""Streams and events that keep their order, and memory that knows who used it.

A clock counts the work of each stream.  `Stream.clock` says of which work the stream comes after,
`host` of which the host does; an event keeps the clock of its stream, and whoever waits for it
takes that over.  A use of memory by (stream s, number n) precedes work on t if t.clock[s] >= n.
"""

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

Clock = dict[int, int]
host: Clock = {}


class RaceError(AssertionError):
    """Memory is used before what came first is known to be done."""


class Use(NamedTuple):
    """Bytes [start, stop) that a stream reads or writes."""

    start: int
    stop: int
    stream: int
    writes: bool


uses: dict[Use, int] = {}  # the number of the last work that does


def forget(start: int, stop: int) -> None:
    """These bytes are free: what comes there next has nothing to do with them."""
    for use in [use for use in uses if start <= use.start and use.stop <= stop]:
        del uses[use]


def merge(into: Clock, other: Clock) -> None:
    """Let `into` come after `other` too."""
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


def check(clock: Clock, start: int, stop: int, writes: bool, who: str) -> None:
    """Raise RaceError if something that used these bytes need not be done by then."""
    for use, number in uses.items():
        meets = use.start < stop and start < use.stop and (writes or use.writes)
        if meets and clock.get(use.stream, 0) < number:
            what = "written" if use.writes else "read"
            raise RaceError(f"{who}: memory that stream {use.stream} may not have {what} yet")


class Stream:
    """Work in order; what was asked for is done by `run`."""

    count = 0

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        Stream.count += 1
        self.number = self.ptr = Stream.count
        self.done = 0
        self.clock: Clock = {}
        self._queue: deque[Callable[[], Any]] = deque()
        _all[self.ptr] = self

    def use(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]], who: str) -> None:
        """Note work on this stream, after what the host has waited for."""
        merge(self.clock, host)
        number = self.done = self.done + 1
        self.clock[self.number] = number
        for spans, write in ((reads, False), (writes, True)):
            for start, stop in spans:
                check(self.clock, start, stop, write, who)
        for spans, write in ((reads, False), (writes, True)):
            uses.update({Use(*span, self.number, write): number for span in spans})

    def later(self, work: Callable[[], Any]) -> None:
        """Put work off until somebody waits."""
        self._queue.append(work)

    def run(self) -> None:
        """Do what was put off."""
        while self._queue:
            self._queue.popleft()()

    def wait_event(self, event: "Event") -> None:
        """Come after an event."""
        merge(self.clock, event.clock)
        self.later(event.run)

    def synchronize(self) -> None:
        """Let the host wait."""
        self.run()
        merge(host, self.clock)

    def __enter__(self) -> "Stream":
        _current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _current.pop()


class Event:
    """A place in a stream."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.timed, self.moment = not disable_timing, 0.0
        self.clock: Clock = {}
        self._stream: Stream | None = None
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind all that the stream has been asked for."""
        self._stream = stream or get_current_stream()
        merge(self._stream.clock, host)
        self.clock, self._asked = dict(self._stream.clock), 0
        self.moment = time.perf_counter()

    def run(self) -> None:
        """Bring the stream here."""
        if self._stream is not None:
            self._stream.run()

    def query(self) -> bool:
        """Say whether the stream is here: not at once."""
        self._asked += 1
        if self._asked < 3:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        self.run()
        merge(host, self.clock)


def get_elapsed_time(start: Event, end: Event) -> float:
    """Return the milliseconds between two events that the host knows to be over."""
    for event in (start, end):
        if not event.timed:
            raise RuntimeError("an event without timing is asked for it")
        if any(host.get(stream, 0) < number for stream, number in event.clock.items()):
            raise RuntimeError("an event is asked for its time before the host has waited for it")
    return (end.moment - start.moment) * 1e3


class Runtime:
    """What is asked of CUDA itself."""

    CUDARuntimeError = RuntimeError

    def getDeviceCount(self) -> int:
        """There is one."""
        return 1

    def getDevice(self) -> int:
        """It is the current one."""
        return 0

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        """Copy between host and device when the stream comes to it."""
        there = _all[stream]
        spans = [(to, to + size)], [(source, source + size)]
        if kind == 1:
            there.use([], spans[0], "copy to the device")
        else:
            there.use(spans[1], [], "copy to the host")
        there.later(functools.partial(ctypes.memmove, to, source, size))


_all: dict[int, Stream] = {}
_current: list[Any] = [Stream()]


def get_current_stream() -> Stream:
    """Return the stream that work goes to."""
    return _current[-1]
