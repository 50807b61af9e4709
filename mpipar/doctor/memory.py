"""Memory that ranks share: can windows be made, is there room, and what have dead jobs left?

MPICH and Open MPI keep shared memory as files in /dev/shm.  A job that was killed may leave them
there; they take memory until somebody deletes them.  A file that no living process has open or
mapped is stale.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mpipar.comm import shared_memory
from mpipar.doctor.finding import Check, Facts, Finding, Job, size
from mpipar.doctor.machine import Machine

PATTERNS = ("mpich_shm_*", "vader_segment*", "sm_segment*", "psm*_shm*", "ucx_shm_*")
WANTED = 1 << 28  # bytes a rank; gradient buckets, windows and the library's own
YOUNG = 5.0  # seconds; a starting job may not have mapped its file yet
PROCESSES = Path("/proc")


def probe(machine: Machine) -> Facts:
    """Make a window and use it; the node's first rank looks into /dev/shm."""
    facts: Facts = {"window": _window_works(machine), "free": None, "total": None, "stale": []}
    folder = Path(shared_memory.FOLDER)
    first_here = machine.job.hosts.index(machine.job.hosts[machine.world.rank])
    if machine.leads and folder.is_dir():
        status = os.statvfs(folder)
        facts["free"] = status.f_bavail * status.f_frsize
        facts["total"] = status.f_blocks * status.f_frsize
        facts["stale"] = stale(folder) if machine.world.rank == first_here else []
    return facts


def _window_works(machine: Machine) -> str:
    """Return "" if each rank of the node sees what its neighbour writes, or what goes wrong."""
    local = machine.team.local
    try:
        segment = shared_memory.Segment(local, 8)
    except RuntimeError as error:  # MPI.Exception
        return str(error)
    mine = segment.parts[local.rank][:8].view(np.int64)
    theirs = segment.parts[(local.rank + 1) % local.size][:8].view(np.int64)
    mine[0] = machine.world.rank + 1000
    segment.sync()
    local.Barrier()
    segment.sync()
    ranks = machine.job.nodes[machine.node]
    seen = int(theirs[0]) == ranks[(local.rank + 1) % local.size] + 1000
    local.Barrier()
    segment.free()
    return "" if seen else "a rank does not see what its neighbour wrote"


def stale(folder: Path) -> list[Facts]:
    """Return the files of MPI libraries that no living process uses: name, bytes, owner, age."""
    now = time.time()
    found = []
    used = None
    for path in sorted(path for pattern in PATTERNS for path in folder.glob(pattern)):
        try:
            status = path.stat()
        except OSError:  # just gone
            continue
        if now - status.st_mtime < YOUNG:
            continue
        used = set(in_use(folder)) if used is None else used
        # of a file of another user, only root sees who uses it
        if path.name not in used and os.geteuid() in (0, status.st_uid):
            age = now - status.st_mtime
            found.append(
                {"name": path.name, "bytes": status.st_blocks * 512, "age_s": round(age)}
                | {"owner": _name_of(status.st_uid)}
            )
    return found


def in_use(folder: Path) -> Iterator[str]:
    """Yield the names of the files in `folder` that processes have mapped or open."""
    start = f"{folder}/"
    for process in PROCESSES.glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, found, name = line.partition(start)
                if found:
                    yield name.removesuffix(" (deleted)")
            for opened in (process / "fd").iterdir():
                target = os.readlink(opened)
                if target.startswith(start):
                    yield target.removeprefix(start)
        except OSError:  # has ended, or is another user's
            continue


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Weigh what is free against what is left over."""
    facts = [
        {"node": number, **told[leader]} for number, leader in enumerate(job.leaders)
    ]  # of each node
    broken = [rank for rank, one in enumerate(told) if one["window"]]
    if broken:
        words = f"no shared windows: {told[broken[0]]['window']} (rank {broken[0]})"
        fix = "Gradients and buckets then travel as messages; start without --shared"
        return Finding("shared memory", "problem", words, fix, facts)
    if facts[0]["free"] is None:
        return Finding("shared memory", "ok", "windows work; there is no /dev/shm", "", facts)
    tightest = min(range(len(facts)), key=lambda n: facts[n]["free"] / len(job.nodes[n]))
    node = facts[tightest]
    free, total, ranks = node["free"], node["total"], len(job.nodes[tightest])
    words = f"windows work; {size(free)} of {size(total)} of /dev/shm free"
    if len(facts) > 1:
        words += f" on {job.where(tightest)}"
    files = sum(len(one["stale"]) for one in facts)
    left = sum(file["bytes"] for one in facts for file in one["stale"])
    small = free < WANTED * ranks
    if not files:
        fix = "Make /dev/shm larger (docker run --shm-size=8g)" if small else ""
        return Finding("shared memory", "note" if small else "ok", words, fix, facts)
    owners = sorted({file["owner"] for one in facts for file in one["stale"]})
    hosts = sorted({job.hosts[job.leaders[n]] for n, one in enumerate(facts) if one["stale"]})
    what = "1 file" if files == 1 else f"{files:,} files"
    words += (
        f"; {what} of jobs that are dead, {size(left)}, of {', '.join(owners)} on "
        f"{', '.join(hosts)}"
    )
    names = sorted({file["name"].partition("_")[0] for one in facts for file in one["stale"]})
    where = " ".join(f"{shared_memory.FOLDER}/{name}_*" for name in names)
    fix = f"While no job of yours runs there: rm {where} (--json lists the files)"
    return Finding("shared memory", "problem" if small else "note", words, fix, facts)


CHECK = Check("shared memory", probe, judge)
