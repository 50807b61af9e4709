"""`mpipar doctor`: look at the machine and the job, or at what a stuck job has left.

mpipar doctor                                 this machine, one rank
mpiexec -n 4 mpipar doctor --json facts.json  ranks, cores, links, clocks, storage
mpipar doctor --report mpipar-report-4711     the watchdogs' reports of all ranks side by side
mpipar doctor --pid 4712                      which rank of which job that process is or was

Exit code: 0 nothing is wrong (notes are no problem), 1 there is a problem, 2 a mistake in a flag.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from mpipar.cli import files
from mpipar.cli.train import HEAD_START, fail
from mpipar.errors import ConfigError, MpiparError, explain
from mpipar.train import launch

__all__ = ["ALONE", "Config", "run"]

ALONE = ()


@dataclass(frozen=True)
class Config:
    """Check MPI, cores, memory, links, clocks and storage; or explain why a job got stuck."""

    dir: Annotated[Path, arg(metavar="PATH")] = Path()
    """The folder for checkpoints, in which writing is tried."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"verdict": ..., "machine": ..., "checks": [...]} with all measured facts here."""
    report: Annotated[Path | None, arg(metavar="PATH")] = None
    """Put the reports of a job that got stuck, which are in this folder, side by side."""
    pid: Annotated[int | None, arg(metavar="INT")] = None
    """Say which rank a process is or was: a launcher may name only its number."""


def run(config: Config) -> int:
    """Collective, but for --report and --pid; return the exit code, the same on every rank."""
    if config.report is not None or config.pid is not None:
        return _read(config) if launch.first_of_job() else 0
    if trouble := launch.start():
        return _not_one_job(config, trouble)
    from mpi4py import MPI

    from mpipar.train.agree import is_of_all_ranks, same, together

    world = MPI.COMM_WORLD
    try:
        same(world, "the configuration", repr(config), "Start all ranks with the same flags.")
        together(world, lambda: files.check(config.json, "json") if world.rank == 0 else None)
        return _examine(config, world)
    except MpiparError as error:
        if not is_of_all_ranks(error):
            raise
        return fail(str(error), world.rank == 0, world.Barrier)


def _examine(config: Config, world: Any) -> int:
    from mpipar.bench import timing
    from mpipar.doctor import show
    from mpipar.doctor.examine import examine
    from mpipar.doctor.finding import worst
    from mpipar.train.agree import together

    findings = examine(world, config.dir)

    def tell() -> int:
        if world.rank != 0:
            return 0
        show.table(findings)
        if config.json is not None:
            files.write(config.json, show.as_json(findings, timing.machine(world)) + "\n", "json")
        return int(worst(findings) == "problem")

    code: int = world.bcast(together(world, tell))
    return code


def _not_one_job(config: Config, trouble: str) -> int:
    """Tell that the launcher started separate jobs; only the first process speaks."""
    from mpipar.doctor import show
    from mpipar.doctor.launcher import unfit

    if launch.first_of_job():
        findings = [unfit(trouble)]
        show.table(findings)
        if config.json is not None:
            files.write(config.json, show.as_json(findings, {}) + "\n", "json")
    time.sleep(HEAD_START)
    return 1


def _read(config: Config) -> int:
    from mpipar.doctor import processes, reports

    files.check(config.json, "json")
    if config.pid is not None:
        return processes.tell(config.pid)
    assert config.report is not None
    if not config.report.is_dir():
        rule = "there is no such folder"
        raise ConfigError(explain("report", str(config.report), rule, "Name the job's reports"))
    return reports.tell(config.report, config.json)
