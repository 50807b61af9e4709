"""From what a user passes to a schedule that all ranks share: its name or file, and the stages.

Checked on every rank before anything else is sent: what one rank finds wrong (a file that only it
reads, a list of another length) is an error on all of them.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.errors import ConfigError, MismatchError, MpiparError, explain
from mpipar.nn.module import Module
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.agreement import exchange
from mpipar.schedule.pipeline import PIPELINES, PipelineSchedule, from_csv, lower, resolve, to_csv
from mpipar.schedule.pipeline.registry import is_path

Stages = Sequence[Any] | Callable[[int], Any]


def arrange(
    comm: Communicator, stages: Stages, schedule: Any, microbatches: Any, chunks: int | None
) -> PipelineSchedule:
    """Collective: return the verified schedule, with its messages.

    Raises on every rank ConfigError for settings that cannot work, ScheduleError for a file with a
    schedule that is wrong (its table, the cell marked), and MismatchError if the ranks differ.
    """
    error: MpiparError | None = None
    found: PipelineSchedule | None = None
    try:
        _check(stages, schedule, microbatches)
        count = len(stages) if isinstance(stages, Sequence) else None
        chunks = _chunks(schedule, comm.size, count, chunks)
        if comm.rank == 0 or not is_path(str(schedule)):  # one rank reads the file
            found = resolve(str(schedule), comm.size, microbatches, chunks)
            _check_count(found, comm.size, count)
    except MpiparError as caught:
        error = caught
    text = repr((str(schedule), microbatches, chunks))
    table = exchange(comm, [zlib.crc32(text.encode())], error)
    if (table != table[0]).any():
        odd = np.flatnonzero(table[:, 0] != table[0, 0]).tolist()
        rule = f"the ranks {odd} pass other settings than rank 0"
        fix = "Pass the same schedule, micro-batches and number of stages on every rank"
        raise MismatchError(explain("schedule", text, rule, fix))
    if is_path(str(schedule)) and comm.size > 1:
        name = found.name if found else Path(str(schedule)).name
        found = _share(comm, found, name)
    assert found is not None
    return lower(found.computation())


def build(comm: Communicator, stages: Stages, held: tuple[int, ...]) -> dict[int, Any]:
    """Collective: return this rank's modules by their stage.

    Raises on every rank what the function of the stages raised on one: as ConfigError, if it is no
    error of mpipar's.
    """
    error: MpiparError | None = None
    cause: Exception | None = None
    made: dict[int, Any] = {}
    try:
        for stage in held:
            made[stage] = stages[stage] if isinstance(stages, Sequence) else stages(stage)
            if not hasattr(made[stage], "parameters"):
                kind = type(made[stage]).__name__
                rule, fix = "a stage must be a Module", "Pass modules, or a function that makes one"
                raise ConfigError(explain(f"stages[{stage}]", kind, rule, fix))
    except MpiparError as caught:
        error = caught
    except Exception as caught:  # from the function, whatever it is: the others must not wait
        cause = caught
        error = ConfigError(f"stages({stage}) raised {type(caught).__name__}: {caught}")
    try:
        exchange(comm, (), error)
    except MpiparError as told:
        raise told from cause
    return made


def _check(stages: Any, schedule: Any, microbatches: Any) -> None:
    """Raise ConfigError for arguments of another kind."""
    is_list = isinstance(stages, list | tuple)
    if not is_list and (isinstance(stages, Module) or not callable(stages)):
        rule = "they must be a list of modules, or a function from a stage's number to its module"
        raise ConfigError(explain("stages", type(stages).__name__, rule, "Pass one of these"))
    if not isinstance(schedule, str | Path):
        rule = f"it must be one of {', '.join(PIPELINES)}, or the path of a CSV file"
        raise ConfigError(explain("schedule", schedule, rule, "Pass such a name"))
    whole = isinstance(microbatches, int | np.integer) and not isinstance(microbatches, bool)
    if not whole or microbatches < 1:
        rule = "it must be a number of micro-batches, at least 1"
        raise ConfigError(explain("microbatches", microbatches, rule, "Pass 1 or more"))


def _chunks(schedule: Any, ranks: int, count: int | None, chunks: int | None) -> int | None:
    """Return the stages on each rank that a list of stages asks for, where one may choose."""
    name = str(schedule)
    free = name in PIPELINES and PIPELINES[name].chunks is None
    if count is None or chunks is not None or not free:
        return chunks
    if count % ranks or not count:
        rule = f"{name} has equally many stages on each of the {ranks} ranks"
        near = " or ".join(
            str(n) for n in (count // ranks * ranks, -(-count // ranks) * ranks) if n
        )
        raise ConfigError(explain("len(stages)", count, rule, f"Pass {near or ranks}"))
    return count // ranks


def _check_count(found: PipelineSchedule, ranks: int, count: int | None) -> None:
    if count is not None and count != found.stages:
        rule = f"{found.name} on {ranks} rank{'s' * (ranks > 1)} has {found.stages} stages"
        fix = f"Cut the model into {found.stages}, or choose interleaved for more of them"
        raise ConfigError(explain("len(stages)", count, rule, fix))


def _share(comm: Communicator, found: PipelineSchedule | None, name: str) -> PipelineSchedule:
    """Give all ranks the schedule that rank 0 has read."""
    text = None
    if found is not None:
        text = np.frombuffer(to_csv(found.computation()).encode(), np.uint8)
    return from_csv(comm.broadcast(text, src=0).tobytes().decode(), name)
