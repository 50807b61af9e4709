"""Which rank a process is or was: read from what rank 0 wrote when the job started.

A launcher may say no more than "PID 4712 RUNNING AT node1".  The file (comm/roster.py) is removed
when a job ends well, so what is there is of jobs that run or were killed.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpipar.errors import ConfigError, explain


def tell(pid: int) -> int:
    """Print which rank of which job a process is; return the exit code.

    Raises ConfigError if no job knows it.
    """
    from mpipar.comm import roster

    places = {roster.folder(): roster.pattern()}
    lines = [line for job in _jobs(places) for line in lines_about(pid, job)]
    if not lines:
        rule = f"no job that started here and did not end well has it (in {roster.folder()})"
        fix = "Ask on the host of rank 0, with the job's MPIPAR_REPORT_DIR"
        raise ConfigError(explain("pid", pid, rule, fix))
    print("\n".join(lines))
    return 0


def _jobs(places: dict[Path, str]) -> Iterator[dict[str, Any]]:
    for folder, pattern in places.items():
        for path in sorted(folder.glob(pattern)):
            try:
                yield json.loads(path.read_text())
            except (OSError, ValueError):  # just removed, or no file of ours
                continue


def lines_about(pid: int, job: dict[str, Any]) -> list[str]:
    """Return a line for each rank of the job with this process id."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"]))
    return [
        f"rank {rank} of {len(job['ranks'])} on {member['host']}, job {job['job']}, started "
        f"{started}{_life(member)}"
        for rank, member in enumerate(job["ranks"])
        if member["pid"] == pid
    ]


def _life(member: dict[str, Any]) -> str:
    if member["host"] != platform.node():
        return ""
    try:
        os.kill(member["pid"], 0)
    except ProcessLookupError:
        return "; it is dead"
    except PermissionError:
        pass
    return "; it lives"
