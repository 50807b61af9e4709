"""Where the time of a step went, by rank: what a trace says in a few lines.

    4 ranks, mean of steps 2 to 20, ms

    rank   step  compute    dp  world   late  delays  idle
       0   51.2     38.9  11.8    0.5    9.6     0.1
       2   51.2     49.7   1.1    0.4    0.2    27.9        <- the others wait for it

compute   time in no communication call
dp, ...   exposed communication by axis: time inside calls of its communicators
late      the part of it in which another rank had not yet come to the collective
delays    what all other ranks together waited for this one to come: the last of its group
idle      share of the pipeline's time, from its first action to its last, in which none ran here

Messages between two ranks have no number by which both ends could be joined: what is late or
delayed by them is in neither column.  The first step of a trace makes plans and buffers, and is
left out if there are others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from mpipar.trace import chrome
from mpipar.trace.parts import Event
from mpipar.trace.pieces import axis, in_steps, pieces

SHOWN = 16  # ranks with a row of their own; of more, least, mean and most are shown
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

Collective = tuple[str, int]  # group, sequence
Window = tuple[str, str]  # step, group


@dataclass
class Times:
    """Seconds of a rank in a mean step."""

    rank: int
    steps: int = 0
    step: float = 0.0
    compute: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    late: float = 0.0
    delays: float = 0.0
    idle: float | None = None  # share of the pipeline's time


@dataclass(frozen=True)
class Summary:
    """Times of all ranks, the seconds of the steps that they are of, and what the file says.

    A step takes as long as on the rank that takes longest.
    """

    ranks: Sequence[Times]
    steps: Mapping[str, float]
    head: Mapping[str, Any]

    @property
    def axes(self) -> list[str]:
        """The axes with communication, those with most first."""
        total: dict[str, float] = defaultdict(float)
        for times in self.ranks:
            for name, seconds in times.exposed.items():
                total[name] += seconds
        return sorted(total, key=lambda name: -total[name])

    @property
    def slowest(self) -> Times:
        """The rank that computes longest."""
        return max(self.ranks, key=lambda times: times.compute)

    @property
    def imbalance(self) -> float:
        """How much longer than the mean the slowest rank computes, as a share of the mean."""
        mean = fmean(times.compute for times in self.ranks)
        return self.slowest.compute / mean - 1.0 if mean else 0.0

    def text(self) -> str:
        """Return the table, and what it comes to."""
        lines = []
        if self.steps:
            lines += self._table()
        else:
            lines.append("no step is in this trace; `with trace.step(number):` marks them")
        if self.head.get("incomplete"):
            ranks = ", ".join(map(str, self.head["incomplete"]))
            lines.append(f"the run did not come to its end on ranks {ranks}")
        if lost := self.head.get("lost"):
            where = ", ".join(f"{count:,} on rank {rank}" for rank, count in lost.items())
            lines.append(f"the trace was full, later spans are not in it: {where}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        mean, numbers = fmean(times.step for times in self.ranks), list(self.steps)
        unit, size = next((one for one in UNITS if mean >= one[1]), UNITS[-1])
        many = len(numbers) > 1
        which = f"steps {numbers[0]} to {numbers[-1]}" if many else f"step {numbers[0]}"
        count = self.head["ranks"]
        title = f"{count} rank{'s' * (count != 1)}, {'mean of ' * many}{which}, {unit}"
        names = ["step", "compute", *self.axes, "late", "delays"]
        names += ["idle"] * any(times.idle is not None for times in self.ranks)
        rows = [(str(times.rank), self._row(times, names, size)) for times in self.ranks]
        if len(rows) > SHOWN:
            rows = _extremes([row for _, row in rows])
        cells = [["rank", *names], *([head, *map(_cell, row, names)] for head, row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
        return [title, "", *lines, "", *self._words(unit, size)]

    def _row(self, times: Times, names: Sequence[str], size: float) -> list[float | None]:
        told = {"step": times.step, "compute": times.compute} | times.exposed
        told |= {"late": times.late, "delays": times.delays}
        return [times.idle if name == "idle" else told.get(name, 0.0) / size for name in names]

    def _words(self, unit: str, size: float) -> list[str]:
        total = fmean(times.step for times in self.ranks)
        exposed = fmean(sum(times.exposed.values()) for times in self.ranks)
        words = [f"exposed communication: {exposed / total:.0%} of a step"]
        longest = max(self.steps, key=lambda step: self.steps[step])
        if len(self.steps) > 1:
            least, most = (of(self.steps.values()) / size for of in (min, max))
            words.append(
                f"steps took {_short(least)} to {_short(most)} {unit}, step {longest} longest"
            )
        if len(self.ranks) > 1:
            slow = self.slowest
            words.append(
                f"slowest rank: {slow.rank}, computes {_short(slow.compute / size)} {unit}, "
                f"{self.imbalance:.0%} more than the mean"
            )
            late = max(self.ranks, key=lambda times: times.delays)
            if late.delays:
                share = late.delays / size
                words.append(
                    f"waited for most: rank {late.rank}, {_short(share)} {unit} a step, "
                    "all other ranks together"
                )
        return words


def _cell(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if name == "idle" else f"{value:.1f}"


def _extremes(rows: list[list[float | None]]) -> list[tuple[str, list[float | None]]]:
    """Return least, mean and most of each column."""
    columns = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    return [
        ("least", [min(column, default=None) for column in columns]),
        ("mean", [fmean(column) if column else None for column in columns]),
        ("most", [max(column, default=None) for column in columns]),
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def summarise(path: Path) -> Summary:
    """Return the summary of a trace; raises ConfigError for a file of something else."""
    head = chrome.head(path)
    arrivals, windows = _look(chrome.events(path))
    times = {rank: Times(rank) for rank in range(head["ranks"])}
    steps: dict[str, float] = {}
    for rank, mine in groupby(chrome.events(path), lambda event: event.rank):
        for step, seconds in _count(times, rank, list(mine), arrivals, windows).items():
            steps[step] = max(seconds, steps.get(step, 0.0))
    for one in times.values():
        _divide(one)
    return Summary([one for one in times.values() if one.steps], steps, head)


def _look(
    events: Iterable[Event],
) -> tuple[dict[Collective, tuple[float, int]], dict[Window, tuple[float, float]]]:
    """Find who came last to each collective, and when; and from when to when pipelines ran."""
    arrivals: dict[Collective, tuple[float, int]] = {}
    windows: dict[Window, tuple[float, float]] = {}
    for rank, mine in groupby(events, lambda event: event.rank):
        own: dict[Collective, float] = {}
        of_rank = list(mine)
        for event in of_rank:
            if event.sequence:
                key = event.group, event.sequence
                own[key] = min(event.start, own.get(key, event.start))
        for key, start in own.items():
            arrivals[key] = max((start, rank), arrivals.get(key, (start, rank)))
        for action, step in in_steps(of_rank, "action"):
            window = step, action.group
            first, last = windows.get(window, (action.start, action.stop))
            windows[window] = min(first, action.start), max(last, action.stop)
    return arrivals, windows


def _count(
    times: dict[int, Times],
    rank: int,
    events: list[Event],
    arrivals: Mapping[Collective, tuple[float, int]],
    windows: Mapping[Window, tuple[float, float]],
) -> dict[str, float]:
    """Add up the time of a rank, and what it waited for others; return its steps' seconds."""
    mine = times.setdefault(rank, Times(rank))
    steps = sorted((e for e in events if e.kind == "step"), key=lambda e: e.start)
    counted = {step.name for step in (steps[1:] or steps)}
    for piece in pieces(events):
        if piece.step is None or piece.step.name not in counted:
            continue
        mine.step += piece.seconds
        if piece.is_communication:
            mine.exposed[axis(piece.inner.communicator)] += piece.seconds
        else:
            mine.compute += piece.seconds
    mine.steps = len(counted)
    for call, step in in_steps(events, "call"):
        last, who = arrivals.get((call.group, call.sequence), (0.0, rank))
        if step in counted and who != rank:
            late = min(max(0.0, last - call.start), call.stop - call.start)
            mine.late += late
            times.setdefault(who, Times(who)).delays += late
    actions = [(action, step) for action, step in in_steps(events, "action") if step in counted]
    if ran := {(step, action.group) for action, step in actions}:
        time = sum(last - first for first, last in (windows[window] for window in ran))
        mine.idle = 1.0 - sum(action.stop - action.start for action, _ in actions) / time
    whole = [step for step in steps if step.name in counted]
    return {step.name.removeprefix("step "): step.stop - step.start for step in whole}


def _divide(times: Times) -> None:
    """Make a mean step of what was added up over steps."""
    count = max(1, times.steps)
    for name in ("step", "compute", "late", "delays"):
        setattr(times, name, getattr(times, name) / count)
    times.exposed = {name: seconds / count for name, seconds in times.exposed.items()}
