"""Which process is which rank: written down when a job starts, gone when it ends well.

A launcher that sees a process die may name only its number ("PID 4711 RUNNING AT node3"), and may
end all others before they can say more.  So the first group of all ranks exchanges host and
process id, and rank 0 writes them to a small file, which it removes when its program ends:

    $MPIPAR_REPORT_DIR/ranks.json, or <folder for temporary files>/mpipar-<user>-<job>.json

`mpipar doctor --pid 4711` reads it.  What is left over from killed jobs goes after a week.
"""

import atexit
import contextlib
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

WEEK = 7 * 24 * 3600.0
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Member(NamedTuple):
    """A rank of the job: its host's name and its process id there."""

    host: str
    pid: int


_members: tuple[Member, ...] = ()


def meet(raw: MPI.Comm) -> None:
    """Let the ranks of the job know each other, the first time that all of them are in a group.

    Collective over `raw`.
    """
    global _members
    if _members or raw.size == 1 or raw.size != MPI.COMM_WORLD.size:
        return
    _members = tuple(Member(*told) for told in raw.allgather((platform.node(), os.getpid())))
    if MPI.COMM_WORLD.rank == 0:
        _write_down(_members)


def members() -> tuple[Member, ...]:
    """Return host and process id of every rank; nothing before the ranks have met."""
    return _members


def job() -> str:
    """Return a name for this job, the same on all ranks that have met."""
    batch = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), None)
    return batch or (str(_members[0].pid) if _members else str(os.getppid()))


def folder() -> Path:
    """Return the folder of the files that say which process is which rank."""
    return Path(os.environ.get("MPIPAR_REPORT_DIR") or tempfile.gettempdir())


def pattern() -> str:
    """Return what the names of these files in `folder` look like."""
    return "ranks.json" if os.environ.get("MPIPAR_REPORT_DIR") else f"mpipar-{os.getuid()}-*.json"


def _write_down(members: tuple[Member, ...]) -> None:
    """Write the file, if that is possible: a job runs without it."""
    path = folder() / pattern().replace("*", job())
    told = {"job": job(), "started": time.time(), "ranks": [m._asdict() for m in members]}
    with contextlib.suppress(OSError):
        _forget_old()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("x") as file:  # never through a link that somebody else has put there
            json.dump(told, file)
        atexit.register(path.unlink, missing_ok=True)


def _forget_old() -> None:
    for path in folder().glob(pattern()):
        if path.stat().st_mtime < time.time() - WEEK:
            path.unlink(missing_ok=True)
