r"""Do the nodes' clocks agree?  Rank 0 asks the first rank of each other node for the time.

    rank 0    t0 ------\            /-----> t1        offset = t - (t0 + t1) / 2,
                        \          /                  wrong by half the time of the round trip
    leader               -> tells t                   at most: the quickest of some counts

Traces of several nodes are put on one clock by this, and a shared file system with skewed clocks
shows files from the future.
"""

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpipar.doctor.finding import Check, Facts, Finding, Job
from mpipar.doctor.machine import Machine

TAG, TIMES = 8, 10
NOTED, WRONG = 0.05, 1.0  # seconds


def probe(machine: Machine) -> Facts:
    """Exchange times; rank 0 returns the offset of each node and how far it may be wrong."""
    offsets: list[tuple[float, float]] = [(0.0, 0.0)]
    for leader in machine.job.leaders[1:]:
        if machine.world.rank == 0:
            offsets.append(ask(machine.world, leader))
        elif machine.world.rank == leader:
            answer(machine.world)
    machine.meet()
    return {"offsets": offsets}


def ask(comm: MPI.Comm, peer: int) -> tuple[float, float]:
    """Return how much the clock of `peer`, which calls `answer`, is ahead, and the uncertainty."""
    best = (0.0, float("inf"))
    there = np.empty(1)
    for _ in range(TIMES):
        before = time.time()
        comm.Send([there, 0, MPI.DOUBLE], peer, TAG)
        comm.Recv([there, 1, MPI.DOUBLE], peer, TAG)
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (float(there[0]) - (before + after) / 2, (after - before) / 2)
    return best


def answer(comm: MPI.Comm) -> None:
    """Tell rank 0 the time as often as it asks."""
    data = np.empty(1)
    for _ in range(TIMES):
        comm.Recv([data, 0, MPI.DOUBLE], 0, TAG)
        data[0] = time.time()
        comm.Send([data, 1, MPI.DOUBLE], 0, TAG)


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
