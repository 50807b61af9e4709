"""What the program of a rank did at each moment: computed, or was inside a communication call.

    step      [--------------------- step 7 ---------------------]
    phases      [----- forward -----]   [------ backward ------]
    calls            [all_reduce]             [wait for it]
    pieces    [.|for.|all_reduce|for|...|back.|wait for it|back|.]

Spans of one rank's program lie within each other; a moment belongs to the innermost.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpipar.trace.parts import Event

DEPTH = {"step": 0, "phase": 1, "action": 2, "call": 3, "wait": 4}  # of spans that begin together
COMMUNICATION = ("call", "wait")


class Piece(NamedTuple):
    """A stretch of time with the innermost span that it lies in, and the outermost, its step."""

    start: float
    stop: float
    inner: Event
    step: Event | None

    @property
    def is_communication(self) -> bool:
        """Whether the program was inside a communication call."""
        return self.inner.kind in COMMUNICATION

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.stop - self.start


def pieces(events: Iterable[Event]) -> Iterator[Piece]:
    """Cut the time of one rank's events, those in flight aside, into pieces, by time."""
    inside: list[tuple[float, Event]] = []  # the spans that are open, and where they end
    now = 0.0

    def close(until: float) -> Iterator[Piece]:
        nonlocal now
        while inside and inside[-1][0] <= until:
            stop, event = inside[-1]
            if stop > now:
                yield _piece(now, stop, event, inside)
                now = stop
            inside.pop()

    for event in sorted(filter(lambda e: e.kind in DEPTH, events), key=_order):
        yield from close(event.start)
        if inside and event.start > now:
            yield _piece(now, event.start, inside[-1][1], inside)
        now = max(now, event.start)
        inside.append((min(event.stop, inside[-1][0]) if inside else event.stop, event))
    yield from close(float("inf"))


def in_steps(events: Iterable[Event], kind: str) -> Iterator[tuple[Event, str]]:
    """Yield the events of a kind that begin in a step, each with the step's name."""
    ordered = list(events)
    steps = sorted((e for e in ordered if e.kind == "step"), key=lambda step: step.start)
    starts = [step.start for step in steps]
    for event in ordered:
        if event.kind == kind:
            number = bisect_right(starts, event.start) - 1
            if number >= 0 and event.start < steps[number].stop:
                yield event, steps[number].name


def axis(communicator: str) -> str:
    """Return the axis whose traffic a communicator carries: dp, for "gradients of dp"."""
    return communicator.rpartition(" of ")[2].partition(":")[0]


def _order(event: Event) -> tuple[float, float, int]:
    return event.start, -event.stop, DEPTH[event.kind]


def _piece(start: float, stop: float, inner: Event, inside: list[tuple[float, Event]]) -> Piece:
    outermost = inside[0][1]
    return Piece(start, stop, inner, outermost if outermost.kind == "step" else None)
