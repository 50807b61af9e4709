"""`mpipar schedule` for pipelines: which rank runs which stage for which micro-batch.

    mpipar schedule show 1f1b -p 4 -m 8
    mpipar schedule show interleaved -p 4 -m 8 --chunks 2 --csv own.csv
    mpipar schedule verify own.csv
    mpipar schedule draw --trace runs/trace
    mpipar schedule simulate pipeline -p 8 -m 32 --forward 1e-3 --backward 1e-3 --weight 1e-3

A name is that of a schedule, `pipeline` for all of them, or a CSV file.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipar.cli.files import write
from mpipar.cli.limits import plural
from mpipar.errors import ConfigError, ScheduleError, explain
from mpipar.schedule import draw as draw_timeline
from mpipar.schedule import draw_timeline as charts
from mpipar.schedule.draw_timeline import seconds
from mpipar.schedule.pipeline import (
    PIPELINES,
    PipelineResult,
    PipelineSchedule,
    draw,
    idle,
    load,
    lower,
    make,
    peak_live,
    pipelines,
    simulate,
    to_csv,
    verify,
)
from mpipar.schedule.pipeline.measured import measured_step
from mpipar.trace import chrome

ALL = "pipeline"
PROVEN_CHUNKS = (1, 2, 3)  # of the interleaved schedule, if no number is asked for


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch on a rank's whole part of the model, and of a message."""

    forward: float
    backward: float
    weight: float
    send: float


def is_pipeline(name: str) -> bool:
    """Say whether a name on the command line is that of pipeline schedules."""
    return name == ALL or name in PIPELINES or _is_file(name)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".csv")


def _named(name: str, ranks: int, microbatches: int, chunks: int | None) -> list[PipelineSchedule]:
    """Return the schedules that a name means; sizes of a file are its own."""
    if _is_file(name):
        return [load(Path(name))]
    if name != ALL:
        return [make(name, ranks, microbatches, chunks)]
    free = {one for one, kind in PIPELINES.items() if kind.chunks is None}
    return [make(one, ranks, microbatches, chunks if one in free else None) for one in pipelines()]


def _one(found: list[PipelineSchedule]) -> PipelineSchedule:
    if len(found) > 1:
        rule = "one picture or file shows one schedule"
        raise ConfigError(explain("name", ALL, rule, f"Say {found[0].name}, for example"))
    return found[0]


def show(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    width: int,
    svg: Path | None,
    csv: Path | None,
) -> int:
    """Print the pictures of schedules, or write one as SVG, as CSV or both."""
    found = _named(name, ranks, microbatches, chunks)
    if svg is not None:
        write(svg, draw(_one(found), "svg"), "svg")
    if csv is not None:
        write(csv, to_csv(_one(found)), "csv")
    if svg is None and csv is None:
        for number, schedule in enumerate(found):
            about = PIPELINES[schedule.name].about if schedule.name in PIPELINES else "from a file"
            print("\n" * (number > 0) + about)
            print(draw(schedule, width=width))
    return 0


def prove(name: str, ranks: Sequence[int], microbatches: Sequence[int], chunks: int | None) -> int:
    """Prove schedules, and their messages, for all sizes; return 0, or 1 if one is wrong."""
    start = time.perf_counter()
    if not _is_file(name):
        _named(name, ranks[0], microbatches[0], chunks)  # a wrong number is told before the table
    print(f"{'':32}{'schedules':>11}{'actions':>14}{'messages':>14}{'activations':>14}")
    try:
        if _is_file(name):
            schedule = load(Path(name))
            print(_proven(schedule.name, [schedule]))
        else:
            for one in pipelines() if name == ALL else (name,):
                free = PIPELINES[one].chunks is None
                many = PROVEN_CHUNKS if free and chunks is None else (chunks,)
                if not free and name == ALL:
                    many = (None,)
                sizes = [(p, m, v) for p in ranks for m in microbatches for v in many]
                print(_proven(one, [make(one, p, m, v) for p, m, v in sizes]), flush=True)
    except ScheduleError as error:
        print(f"mpipar: error: {error}", file=sys.stderr)
        return 1
    print(f"all proven, {time.perf_counter() - start:.1f} s by the clock")
    return 0


def _proven(name: str, schedules: list[PipelineSchedule]) -> str:
    """Prove schedules with and without their messages; return a row that counts what was proven."""
    actions = messages = most = 0
    for schedule in schedules:
        verify(schedule)
        lowered = schedule if schedule.lowered else lower(schedule)
        verify(lowered)
        plain = schedule.computation()
        actions += sum(map(len, plain.actions))
        messages += (sum(map(len, lowered.actions)) - sum(map(len, plain.actions))) // 2
        most = max(most, *peak_live(schedule))
    return f"{name:32}{len(schedules):>11,}{actions:>14,}{messages:>14,}{most:>14,}"


def cost(name: str, ranks: int, microbatches: int, chunks: int | None, times: Times) -> int:
    """Print what schedules cost."""
    found = _named(name, ranks, microbatches, chunks)
    first = found[0]
    results = [_simulated(schedule, times) for schedule in found]
    print(
        f"{plural(first.ranks, 'rank')}, {plural(first.microbatches, 'micro-batch')}; "
        f"a micro-batch on a rank: "
        f"forward {seconds(times.forward)}, backward {seconds(times.backward)} for inputs and "
        f"{seconds(times.weight)} for weights; a message {seconds(times.send)}"
    )
    print(f"\n{'':20}{'time':>10}{'idle':>10}   most activations held, by rank")
    for schedule, result in zip(found, results, strict=True):
        held = " ".join(f"{count / schedule.chunks:.3g}" for count in result.peak_live)
        row = f"{schedule.name:20}{seconds(result.makespan):>10}{100 * result.bubble:>8.1f} %"
        print(f"{row}   {held}")
    return 0


def _simulated(schedule: PipelineSchedule, times: Times) -> PipelineResult:
    """Simulate a schedule whose ranks' parts of the model are cut evenly into stages."""
    v = schedule.chunks
    return simulate(schedule, times.forward / v, times.backward / v, times.weight / v, times.send)


def chart(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    times: Times,
    width: int,
    svg: Path | None,
) -> int:
    """Draw when each rank runs what, in simulated time."""
    schedule = _one(_named(name, ranks, microbatches, chunks))
    result = _simulated(schedule, times)
    title = (
        f"{schedule.name} on {plural(schedule.ranks, 'rank')}, "
        f"{plural(schedule.microbatches, 'micro-batch')}: "
        f"{seconds(result.makespan)}, idle {100 * result.bubble:.1f} %"
    )
    if svg is None:
        print(f"{title}\n\n{draw_timeline(result.timeline, width=width)}")
    else:
        write(svg, draw_timeline(result.timeline, "svg", title=title), "svg")
    return 0


def compare(name: str, trace: Path | None, step: int | None, width: int, svg: Path | None) -> int:
    """Draw a step of a traced run below the same step in simulated time."""
    if trace is None:
        raise ConfigError(explain("step", step, "only a trace has steps", "Pass --trace too"))
    if name:
        rule = "the schedule is that of the traced run"
        raise ConfigError(explain("name", name, rule, "Leave it out, or --trace"))
    path = chrome.find(trace)
    pipelines_there = chrome.head(path)["pipelines"]
    if not pipelines_there:
        fix = "Trace a run with --pp 2 or more"
        raise ConfigError(explain("trace", str(path), "no pipeline ran in it", fix))
    found = measured_step(pipelines_there, chrome.events(path), step)
    schedule, simulated, measured = found.schedule, found.simulated, found.timeline
    sizes = f"{plural(schedule.ranks, 'rank')}, {plural(schedule.microbatches, 'micro-batch')}"
    headline = f"{schedule.name} on {sizes}, {found.step} of {path}"
    words = "simulated, each action as long as the median of its stage", "measured"
    pictures = [
        (f"{about}: {seconds(one.makespan)}, idle {100 * idle(one):.1f} %", one)
        for about, one in zip(words, (simulated.timeline, measured), strict=True)
    ]
    if svg is not None:
        write(svg, charts.svg_of_several(headline, pictures), "svg")
        return 0
    print(headline)
    end = max(measured.makespan, simulated.makespan)
    for about, timeline in pictures:
        print(f"\n{about}\n\n{charts.text(timeline, width, end)}")
    return 0
