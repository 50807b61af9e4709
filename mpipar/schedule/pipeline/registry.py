"""The table of pipeline schedules, and `make` and `resolve` to get one by name or from a file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import ConfigError, explain
from mpipar.schedule.pipeline.core import PipelineSchedule, Row
from mpipar.schedule.pipeline.gpipe import gpipe
from mpipar.schedule.pipeline.interleaved import interleaved
from mpipar.schedule.pipeline.one_f_one_b import one_f_one_b
from mpipar.schedule.pipeline.table import load
from mpipar.schedule.pipeline.zero_bubble import zb1p, zbv


@dataclass(frozen=True)
class Pipeline:
    """One kind of schedule: its generator, and how many stages a rank holds.

    `row(p, m, rank)` returns the actions of a rank; it takes `chunks` too where the user chooses
    them (`chunks` is None here).  `folded` says that the stages run down the ranks and back up.
    """

    row: Callable[..., Row]
    chunks: int | None
    about: str
    folded: bool = False


PIPELINES = {
    "gpipe": Pipeline(gpipe, 1, "all forward passes, then all backward ones (Huang et al. 2019)"),
    "1f1b": Pipeline(one_f_one_b, 1, "forward and backward in turn (Narayanan et al. 2021)"),
    "interleaved": Pipeline(
        interleaved, None, "1F1B with several stages on each rank (Narayanan et al. 2021)"
    ),
    "zb1p": Pipeline(zb1p, 1, "1F1B with weight gradients put off (Qi et al. 2023)"),
    "zbv": Pipeline(zbv, 2, "zero bubble, stages in a V (Qi et al. 2024)", folded=True),
}
CHUNKS = 2  # stages that a rank of the interleaved schedule holds if nothing is said


def pipelines() -> tuple[str, ...]:
    """Return the names of the pipeline schedules."""
    return tuple(PIPELINES)


def make(name: str, p: int, m: int, chunks: int | None = None) -> PipelineSchedule:
    """Return the schedule `name` for `p` ranks and `m` micro-batches.

    `chunks` is the number of stages on each rank: any for interleaved (2 if None), 2 for zbv, 1 for
    the others.

    Raises ConfigError for an unknown name, p < 1, m < 1, or chunks that the schedule cannot have.
    """
    if name not in PIPELINES:
        rule = f"the pipeline schedules are {', '.join(PIPELINES)}"
        raise ConfigError(explain("schedule", name, rule, "Choose one of them, or name a CSV file"))
    if p < 1:
        raise ConfigError(explain("p", p, "a pipeline has at least one rank", "Pass p >= 1"))
    if m < 1:
        raise ConfigError(
            explain("microbatches", m, "there is at least one micro-batch", "Pass 1 or more")
        )
    kind = PIPELINES[name]
    v = _chunks(name, kind, chunks)
    options = {} if kind.chunks else {"chunks": v}
    placement = [rank for chunk in range(v) for rank in _ranks(p, kind.folded and chunk % 2 == 1)]
    rows = (kind.row(p, m, rank, **options) for rank in range(p))
    return PipelineSchedule(name, m, tuple(placement), tuple(rows))


def resolve(schedule: str, p: int, m: int, chunks: int | None = None) -> PipelineSchedule:
    """Return a schedule by its name, or the verified one of a CSV file, for `p` ranks.

    Anything that ends in .csv or has a slash in it is a path.

    Raises ConfigError where `make` does, for a file that cannot be read, and for one with other
    ranks, micro-batches or stages than asked for; ScheduleError for a schedule that is wrong.
    """
    if not is_path(schedule):
        return make(schedule, p, m, chunks)
    found = load(Path(schedule))
    wanted = [("ranks", found.ranks, p), ("micro-batches", found.microbatches, m)]
    if chunks is not None:
        wanted.append(("stages", found.stages, p * chunks))
    for what, has, asked in wanted:
        if has != asked:
            rule = f"the file is a schedule of {has} {what}, and {asked} are asked for"
            raise ConfigError(explain("schedule", schedule, rule, f"Ask for {has}, or change it"))
    return found


def is_path(schedule: str) -> bool:
    """Say whether the name of a schedule is that of a file."""
    return schedule.lower().endswith(".csv") or "/" in schedule


def _ranks(p: int, up: bool) -> range:
    return range(p - 1, -1, -1) if up else range(p)


def _chunks(name: str, kind: Pipeline, chunks: int | None) -> int:
    if chunks is None:
        return kind.chunks or CHUNKS
    if chunks < 1 or kind.chunks not in (None, chunks):
        has = f"{kind.chunks} on each rank" if kind.chunks else "at least one stage on each rank"
        rule = f"{name} has {has}"
        raise ConfigError(explain("chunks", chunks, rule, "Use interleaved for any number from 1"))
    return chunks
