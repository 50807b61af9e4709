"""What the subcommands can do in a bearable time and memory, asked before they begin."""

import math
from collections.abc import Sequence

from mpipar.errors import ConfigError, explain
from mpipar.schedule import CommSchedule

CHUNKS = 1 << 17  # ranks x segments of a schedule
DRAWN = 100_000  # operations of a picture of rounds, or actions of one of a pipeline
SIMULATED = 500_000  # actions of a simulated pipeline
PROVEN = 1_000_000_000  # sum of the squares of the rank counts: about an hour of one core
PROVEN_ACTIONS = 20_000_000  # of pipelines: some minutes
NARROWEST, WIDEST = 20, 10_000  # characters of a line
PROCESSES = 256


def plural(number: int, noun: str) -> str:
    """Return "1 rank", "1,024 ranks" or "2 micro-batches"."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def check_ranks(p: int, segments: int = 1) -> None:
    """Raise ConfigError for no ranks, or more ranks x segments than CHUNKS."""
    if p < 1:
        raise ConfigError(explain("p", p, "a group has at least one rank", "Say -p 1 or more"))
    rule = f"ranks x segments must be at most {CHUNKS:,}"
    if p > CHUNKS:
        raise ConfigError(explain("p", p, rule, "Say a lower -p"))
    if p * segments > CHUNKS:
        fix = f"Say --segments {CHUNKS // p} or less"
        raise ConfigError(explain("segments", segments, rule, fix))


def check_finite(**values: float) -> None:
    """Raise ConfigError for a value that is infinite or no number."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(explain(name, value, "it must be finite", "Pass a number"))


def check_width(width: int) -> None:
    """Raise ConfigError for lines in which nothing can be drawn."""
    if not NARROWEST <= width <= WIDEST:
        rule = f"a line must have {NARROWEST} to {WIDEST:,} characters"
        raise ConfigError(explain("width", width, rule, "Say --width 96, for example"))


def check_drawn(schedule: CommSchedule) -> None:
    """Raise ConfigError for a schedule of more operations than a picture can show."""
    operations = 0
    for rank in range(schedule.ranks):
        for ops in schedule.rounds(rank):
            operations += len(ops)
            if operations > DRAWN:
                rule = f"{schedule.name} has more than the {DRAWN:,} operations that are drawn"
                fix = "Say a lower -p or --segments"
                raise ConfigError(explain("p", schedule.ranks, rule, fix))


def check_jobs(jobs: int | None) -> None:
    """Raise ConfigError for no processes to share the work, or too many."""
    if jobs is not None and not 1 <= jobs <= PROCESSES:
        rule = f"there must be 1 to {PROCESSES} processes"
        raise ConfigError(explain("jobs", jobs, rule, "Say --jobs 1, or leave it out"))


def check_proof(counts: Sequence[int], algorithms: int) -> None:
    """Raise ConfigError for more work than verify should begin."""
    if algorithms * sum(p * p for p in counts) > PROVEN:
        rule = f"the squares of all rank counts must add up to at most {PROVEN // algorithms:,}"
        raise ConfigError(explain("ranks", max(counts), rule, "Say fewer or lower rank counts"))


def check_actions(p: int, microbatches: int, chunks: int | None, limit: int) -> None:
    """Raise ConfigError for a pipeline schedule of more than `limit` actions."""
    check_ranks(p)
    if p * microbatches * 3 * (chunks or 1) > limit:
        rule = f"ranks x micro-batches x 3 x chunks must be at most {limit:,}"
        raise ConfigError(explain("microbatches", microbatches, rule, "Say a lower -m or -p"))


def check_pipeline_proof(
    counts: Sequence[int], microbatches: Sequence[int], chunks: int | None
) -> None:
    """Raise ConfigError for more pipelines than verify should begin."""
    if sum(counts) * sum(microbatches) * 3 * (chunks or 1) > PROVEN_ACTIONS:
        rule = f"all ranks x micro-batches x 3 x chunks must add up to at most {PROVEN_ACTIONS:,}"
        raise ConfigError(explain("ranks", max(counts), rule, "Say fewer or lower -p or -m"))
