"""What a rank writes when something goes wrong: one file a rank, no collective calls.

    mpipar-report-<job>/rank0.json  rank1.json  ...         (or in MPIPAR_REPORT_DIR)

A rank whose watchdog gives up writes what it knows of all its communicators: the last calls of
each, where the current one stands, whom it waits for, and what other ranks have told.  It then asks
the others, by the watchdogs' own messages, to do the same, and gives them a moment, since it is
about to end the job.  A rank that only waits for long writes too, so that a job that seems to hang
can be looked at; that file goes when the job ends well.

`mpipar doctor --report DIR` puts the files side by side.
"""

import atexit
import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpipar.comm import roster

if TYPE_CHECKING:
    from mpipar.comm.flight import Flight

LONG_WAIT = 30.0  # seconds; then a waiting rank writes, and again now and then
GRACE = 2.0  # seconds for the others to write, before the job ends

_started = time.time()
_written: Path | None = None
_failed = False  # a report of a failure stays


def directory() -> Path:
    """Return the folder of this job's reports."""
    named = os.environ.get("MPIPAR_REPORT_DIR")
    return Path(named) if named else Path.cwd() / f"mpipar-report-{roster.job()}"


def write(why: str, flights: Iterable["Flight"], failed: bool) -> Path | None:
    """Write this rank's report; return where it is, or None if it cannot be written.

    A report of a rank that only waits (`failed` is False) is removed at the end of the program.
    """
    global _written, _failed
    world = MPI.COMM_WORLD
    path = directory() / f"rank{world.rank}.json"
    told: dict[str, Any] = {"rank": world.rank, "size": world.size, "host": platform.node()}
    told |= {"pid": os.getpid(), "job": roster.job(), "time": time.time(), "why": why}
    told["ranks"] = [member._asdict() for member in roster.members()]
    told["communicators"] = [
        flight.as_json() for flight in sorted(flights, key=lambda flight: flight.number)
    ]
    whole = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps(told, indent=1) + "\n")
        whole.replace(path)
    except OSError:  # a full disk must not hide what is being reported
        return None
    _written, _failed = path, _failed or failed
    return path


def written() -> bool:
    """Say whether this rank has a report of a failure."""
    return _failed


def wait_for_others() -> None:
    """Give the other ranks time to write theirs; returns at once when all have."""
    deadline = time.monotonic() + GRACE
    files = [directory() / f"rank{rank}.json" for rank in range(MPI.COMM_WORLD.size)]
    while time.monotonic() < deadline and not all(_is_new(file) for file in files):
        time.sleep(0.05)


def _is_new(file: Path) -> bool:
    """Say whether a file is there and not of an earlier job."""
    try:
        return file.stat().st_mtime > _started - 1.0
    except OSError:
        return False


@atexit.register
def _remove_what_was_only_a_wait() -> None:
    if _written is not None and not _failed:
        _written.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have theirs there
            _written.parent.rmdir()
