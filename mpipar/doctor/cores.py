"""Which cores each rank may run on, and whether the ranks of a node get in each other's way.

4 cores, ranks bound well     0: 0   1: 1   2: 2   3: 3
bound to the same core        0: 0   1: 0   2: 0   3: 0      a problem: cores 1 to 3 are idle
not bound                     0: 0-3 1: 0-3 2: 0-3 3: 0-3    fine
4 ranks on 2 cores            a note: waiting ranks then sleep, and everything is slower
"""

import os
from collections.abc import Sequence
from pathlib import Path

from mpipar.comm import node
from mpipar.doctor.finding import Check, Facts, Finding, Job, listed, ranks_of, who
from mpipar.doctor.machine import Machine

ALLOTTED = Path("/sys/fs/cgroup/cpuset.cpus.effective")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def probe(machine: Machine) -> Facts:
    """Ask the system."""
    bound = hasattr(os, "sched_getaffinity")
    return {
        "cores": sorted(os.sched_getaffinity(0)) if bound else list(range(node.cores())),
        "there": allotted(),
        "quota": quota(),
    }


def allotted() -> int:
    """Return the cores that this job may use on this node, whatever a rank is bound to."""
    try:
        parts = [part.split("-") for part in ALLOTTED.read_text().strip().split(",")]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)
    except (OSError, ValueError):
        return os.cpu_count() or 1


def quota() -> float | None:
    """Return how many cores' time the control group grants, or None if it sets no limit."""
    try:
        most, period = QUOTA.read_text().split()
        return int(most) / int(period)
    except (OSError, ValueError):  # "max", or no control groups
        return None


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Find ranks that share cores while others are idle, then nodes with too few."""
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    for number, ranks in enumerate(job.nodes):
        there = told[ranks[0]]["there"]
        for cores in {tuple(told[rank]["cores"]) for rank in ranks}:
            inside = [rank for rank in ranks if set(told[rank]["cores"]) <= set(cores)]
            if len(inside) > len(cores) and len(ranks) <= there:
                words = f"{who(inside)} share {_cores(cores)} of the {there} on {job.where(number)}"
                fix = "Bind each rank to its own: srun --cpu-bind=cores, or mpiexec -bind-to core"
                return Finding("cores", "problem", words, fix, facts)
    for number, ranks in enumerate(job.nodes):
        there = told[ranks[0]]["there"]
        limit = told[ranks[0]]["quota"]
        enough = there if limit is None else min(there, limit)
        if len(ranks) > enough:
            words = f"{len(ranks)} ranks on {enough:g} cores of {job.where(number)}"
            fix = "Waiting ranks sleep, so it works, but slowly: start fewer ranks"
            return Finding("cores", "note", words, fix, facts)
    groups = ranks_of([{"cores": tuple(one["cores"])} for one in told], "cores")
    shown = [f"{who(ranks)}: {_cores(cores)}" for cores, ranks in list(groups.items())[:4]]
    return Finding("cores", "ok", "; ".join(shown) + "; ..." * (len(groups) > 4), "", facts)


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' * (len(cores) != 1)} {listed(cores)}"


CHECK = Check("cores", probe, judge)
