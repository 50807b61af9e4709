"""A step of a pipeline as a trace has it, and as its schedule would have it with the same actions.

    simulated   every action takes what is the median for its stage and kind, messages nothing
    measured    when the actions ran

What the measured one is longer by, ranks have waited: for messages, or for actions that took longer
than their kind usually does.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.schedule.pipeline.action import Action, parse_action
from mpipar.schedule.pipeline.core import PipelineSchedule
from mpipar.schedule.pipeline.simulate import PipelineResult, simulate, span
from mpipar.schedule.pipeline.table import from_csv
from mpipar.trace import Timeline
from mpipar.trace.parts import Event
from mpipar.trace.pieces import in_steps

Ran = list[tuple[Action, float, float]]  # action, start, stop


@dataclass(frozen=True)
class Measured:
    """A step: its name ("step 12"), the schedule, when its actions ran, and the simulation."""

    step: str
    schedule: PipelineSchedule
    timeline: Timeline
    simulated: PipelineResult


def measured_step(
    pipelines: Mapping[str, Mapping[str, Any]], events: Iterable[Event], step: int | None = None
) -> Measured:
    """Return a step of the first pipeline of a trace; the last step if no number is given.

    pipelines, events: of a trace's file (`mpipar.trace.chrome`).
    Raises ConfigError if the trace has not all of the step.
    """
    group, told = next(iter(pipelines.items()))
    schedule = from_csv(told["csv"], told["name"])
    whole = sum(map(len, schedule.actions))
    steps = {n: ran for n, ran in _by_step(events, group).items() if len(ran) == whole}
    wanted = f"step {step}" if step is not None else max(steps, key=_number, default="")
    if wanted not in steps:
        there = ", ".join(name.removeprefix("step ") for name in sorted(steps, key=_number))
        rule = f"the trace has all actions of the steps {there or '(none)'}"
        raise ConfigError(explain("step", step, rule, "Name one of them"))
    ran = steps[wanted]
    origin = min(start for _, start, _ in ran)
    timeline = Timeline()
    for action, start, stop in ran:
        rank = schedule.placement[action.stage]
        timeline.add(span(rank, action, start - origin, stop - origin))
    forward, backward, weight = (_medians(ran, kind, schedule.stages) for kind in "FBW")
    simulated = simulate(schedule, forward, backward, weight)
    return Measured(wanted, schedule, timeline, simulated)


def _by_step(events: Iterable[Event], group: str) -> dict[str, Ran]:
    found: dict[str, Ran] = defaultdict(list)
    for _, mine in groupby(events, lambda event: event.rank):
        for event, step in in_steps(mine, "action"):
            if event.group == group:
                found[step].append((parse_action(event.name), event.start, event.stop))
    return found


def _number(step: str) -> int:
    return int(step.removeprefix("step "))


def _medians(ran: Ran, kind: str, stages: int) -> list[float]:
    """Return what actions of a kind take on each stage; 0 where there are none."""
    times: list[list[float]] = [[] for _ in range(stages)]
    for action, start, stop in ran:
        if action.kind == kind:
            times[action.stage].append(stop - start)
    return [median(each) if each else 0.0 for each in times]
