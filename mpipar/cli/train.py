"""`mpipar train`: train a model on all ranks that the launcher started.

    mpiexec -n 4 mpipar train --tp 2 --log run.jsonl

A mistake that all ranks see is one line of rank 0 and exit code 2 on every rank.  Collectives that
do not fit together are one line of each rank that sees it, and the end of the job.  Anything else
that only one rank sees is left to the abort hook, which ends the job and names the rank.
"""

import platform
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from mpipar.errors import (
    BufferMismatchError,
    CollectiveTimeoutError,
    DtypeMismatchError,
    MismatchError,
    MpiparError,
)
from mpipar.train.config import TrainConfig as Config

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipar.train.signals import Signals

__all__ = ["ALONE", "Config", "run"]

ALONE = ()

BETWEEN_RANKS = (BufferMismatchError, CollectiveTimeoutError, DtypeMismatchError, MismatchError)
LOST_EARLY = "elastic=True: a rank died before training began. Start the job again"
HEAD_START = 0.5  # seconds for one process to speak, where the others cannot be told when it has


def run(config: Config, read: Callable[[Config], Config]) -> int:
    """Collective: train as `config` says; return the exit code, the same on every rank.

    read: reads the command again, with other settings where it gives none.
    """
    from mpipar.train.signals import Signals

    with Signals() as signals:
        return _run(config, read, signals)


def _run(config: Config, read: Callable[[Config], Config], signals: "Signals") -> int:
    """Train; a signal that comes from now on ends the run in order."""
    from mpipar.train import launch

    if trouble := launch.start(limit=config.timeout):
        return fail(trouble, launch.first_of_job(), lambda: time.sleep(HEAD_START))
    from mpi4py import MPI

    from mpipar.comm import survive
    from mpipar.comm.abort import end_job
    from mpipar.train import heap
    from mpipar.train.again import going_on
    from mpipar.train.agree import is_of_all_ranks, speaker_of, together
    from mpipar.train.loop import train
    from mpipar.train.progress import display
    from mpipar.train.report import JsonLog, Plot, Report, Several

    heap.keep_freed()
    world = MPI.COMM_WORLD

    def reports(goes_on: bool) -> Report:
        made: list[Report] = [JsonLog(config.log, goes_on)] if config.log else []
        made += [Plot(config.plot)] if config.plot else []
        return Several([*made, display(config)])

    try:
        config = together(world, lambda: going_on(config, read))
        report = reports(config.resume is not None) if world.rank == 0 else Report()
        with closing(report):
            train(config, world, report, signals, lambda: reports(True))
    except MpiparError as error:
        if is_of_all_ranks(error):
            return fail(str(error), world.rank == speaker_of(error), lambda: meet(world))
        if not isinstance(error, BETWEEN_RANKS):
            raise
        end_job(f"mpipar: error: rank {world.rank} on {platform.node()}: {error}", 2, by_code=True)
    except MPI.Exception as error:
        if not (config.elastic and survive.tells(error, world)):
            raise
        return fail(LOST_EARLY, True, lambda: None)
    return 0


def meet(world: "MPI.Comm") -> None:
    """Wait for the other ranks, if they live."""
    from mpi4py import MPI

    with suppress(MPI.Exception):
        world.Barrier()


def fail(text: str, speaks: bool, wait: Callable[[], None]) -> int:
    """Print an error if this rank is the one that speaks; return the exit code for it.

    `wait` until it has: a launcher may end the job as soon as one rank has left with an error.
    """
    if speaks:
        print(f"mpipar: error: {text}", file=sys.stderr, flush=True)
    wait()
    return 2
