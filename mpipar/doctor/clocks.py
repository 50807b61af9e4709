"""Do the nodes' clocks agree?

A shared file system whose clocks differ shows files from the future, and logs of several nodes
cannot be put side by side.  (Traces measure it for themselves.)
"""

import time
from collections.abc import Sequence

from mpipar.comm.clocks import offsets
from mpipar.doctor.finding import Check, Facts, Finding, Job
from mpipar.doctor.machine import Machine

NOTED, WRONG = 0.05, 1.0  # seconds


def probe(machine: Machine) -> Facts:
    """Exchange times; rank 0 returns the offset of each node and how far it may be wrong."""
    found = offsets(machine.world, machine.job.leaders, time.time)
    machine.meet()
    return {"offsets": found}


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Name the node whose clock is furthest off."""
    offsets = told[0]["offsets"]
    facts = [{"node": n, "offset_s": o, "uncertain_s": u} for n, (o, u) in enumerate(offsets)]
    if len(offsets) == 1:
        return Finding("clocks", "ok", "one node, one clock", "", facts)
    furthest = max(range(1, len(offsets)), key=lambda n: abs(offsets[n][0]) - offsets[n][1])
    offset, uncertain = offsets[furthest]
    words = f"furthest from rank 0's: {job.where(furthest)}, {offset * 1e3:+.3f} ms"
    words += f" (within {uncertain * 1e3:.3f} ms)"
    if abs(offset) - uncertain < NOTED:
        return Finding("clocks", "ok", words, "", facts)
    fix = f"Let {job.hosts[job.leaders[furthest]]} keep its time by chrony or ntpd"
    verdict = "problem" if abs(offset) - uncertain > WRONG else "note"
    return Finding("clocks", verdict, words, fix, facts)  # type: ignore[arg-type]


CHECK = Check("clocks", probe, judge)
