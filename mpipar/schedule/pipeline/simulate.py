"""What a pipeline schedule costs: when each action runs, how long ranks are idle, what they hold.

A rank runs its actions one after another, each as soon as what it needs has been computed and, from
another rank, has arrived `send` seconds later.  Messages travel while both ranks compute; starting
them costs the ranks themselves no time, unless that was measured.  With all F, B and W equal, no
time for messages, p ranks and m micro-batches, the idle share of the makespan is

    gpipe, 1f1b   (p-1)/(m+p-1)
    interleaved   (p-1)/(v m+p-1)       v stages of 1/v of the size on each rank, m >= p
    zb1p          (p-1)/(3m+p-1)        m >= 2p
    zbv           (p-1)/(6m+p-1)        m >= 2p-1; two stages of half the size on each rank
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpipar.errors import ConfigError, explain
from mpipar.schedule.pipeline.action import COMPUTE, Action
from mpipar.schedule.pipeline.core import PipelineSchedule, peak_live
from mpipar.schedule.pipeline.verify import verify
from mpipar.trace import Span, Timeline

Seconds = float | Sequence[float]  # of every stage, or one for each


@dataclass(frozen=True)
class PipelineResult:
    """What a simulation found: seconds, the idle share of ranks * makespan, activations held.

    `peak_live` counts, by rank, what stages keep of one micro-batch each (see `live`).
    """

    makespan: float
    bubble: float
    peak_live: tuple[int, ...]
    timeline: Timeline


def simulate(
    schedule: PipelineSchedule,
    forward: Seconds = 1.0,
    backward: Seconds = 1.0,
    weight: Seconds = 1.0,
    send: float = 0.0,
    measured: Mapping[Action, float] | None = None,
) -> PipelineResult:
    """Return how long `schedule` takes, and what each rank does when.

    `forward`, `backward` and `weight` are the seconds of F, of the gradient of a stage's input, and
    of the gradient of its weights: numbers, or a sequence with one for each stage.  A B that is not
    split takes backward + weight.  `send` is what a message takes on its way; `measured` has the
    seconds of single actions, which then take these instead; those of a lowered schedule's messages
    keep the rank busy where they stand in its row.

    Raises ScheduleError for a schedule that is not correct, ConfigError for times that are negative
    or not one for each stage.
    """
    order = verify(schedule.computation()).in_order()
    times = {
        kind: _by_stage(COMPUTE[kind], seconds, schedule.stages)
        for kind, seconds in (("F", forward), ("B", backward), ("W", weight))
    }
    if not send >= 0:
        raise ConfigError(explain("send", send, "a time is not negative", "Pass 0 or more"))
    if not schedule.split:
        times["B"] = [b + w for b, w in zip(times["B"], times["W"], strict=True)]
    measured = measured or {}
    posts, sent = _posting(schedule, measured), _sending(schedule, measured)
    plain, placement = schedule.computation(), schedule.placement
    timeline, free, ended = Timeline(), [0.0] * schedule.ranks, dict[Action, float]()
    for rank, action in order:
        start = free[rank] + posts.get(action, 0.0)
        for needed in plain.needs(action):
            sender = placement[needed.stage]
            start = max(
                start, ended[needed] + (sent.get(needed, 0.0) + send if sender != rank else 0.0)
            )
        seconds = measured.get(action, times[action.kind][action.stage])
        free[rank] = ended[action] = start + seconds
        timeline.add(span(rank, action, start, start + seconds))
    return PipelineResult(timeline.makespan, idle(timeline), peak_live(schedule), timeline)


def _posting(schedule: PipelineSchedule, measured: Mapping[Action, float]) -> dict[Action, float]:
    """Return for each F, B and W the seconds of its rank's messages since the one before it."""
    found: dict[Action, float] = {}
    for row in schedule.actions:
        seconds = 0.0
        for action in row:
            if action.computes:
                found[action], seconds = seconds, 0.0
            else:
                seconds += measured.get(action, 0.0)
    return found


def _sending(schedule: PipelineSchedule, measured: Mapping[Action, float]) -> dict[Action, float]:
    """Return for each F and B the seconds until what it made is sent."""
    if not schedule.lowered:
        return {}
    pairs = ((a, schedule.message(a)) for row in schedule.actions for a in row if a.computes)
    return {action: measured.get(ends[0], 0.0) for action, ends in pairs if ends is not None}


def span(rank: int, action: Action, start: float, stop: float) -> Span:
    """Return the span of an action, simulated or measured, as pictures show it."""
    return Span(rank, str(action), COMPUTE.get(action.kind, "message"), start, stop)


def idle(timeline: Timeline) -> float:
    """Return the share of ranks * makespan in which no action runs (other spans count as idle)."""
    ranks = timeline.ranks()
    busy = sum(s.stop - s.start for s in timeline.spans if s.kind in COMPUTE.values())
    whole = len(ranks) * timeline.makespan
    return 1.0 - busy / whole if whole else 0.0


def _by_stage(name: str, seconds: Seconds, stages: int) -> list[float]:
    found = [float(seconds)] * stages if isinstance(seconds, int | float) else list(seconds)
    if len(found) != stages:
        rule = f"there are {stages} stages"
        raise ConfigError(explain(f"len({name})", len(found), rule, "Pass a time for each"))
    if not all(value >= 0 for value in found):
        raise ConfigError(explain(name, seconds, "a time is not negative", "Pass 0 or more"))
    return found
