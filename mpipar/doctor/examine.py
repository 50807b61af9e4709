"""Runs all checks, one after the other, on all ranks; none of them may hang the job."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

from mpipar.comm.abort import end_job
from mpipar.doctor import (
    clocks,
    cores,
    gpu,
    kernels,
    launcher,
    links,
    memory,
    mpi_library,
    speed,
    storage,
    threads,
)
from mpipar.doctor.finding import Check, Finding
from mpipar.doctor.machine import Machine, explore

CHECKS = tuple(
    part.CHECK
    for part in (
        *(mpi_library, launcher, cores, threads, memory, gpu),
        *(kernels, links, clocks, speed, storage),
    )
)
LIMIT = 120.0  # seconds for one check; compiling on a busy machine takes long


def examine(
    world: MPI.Intracomm, directory: Path, checks: Sequence[Check] = CHECKS
) -> list[Finding]:
    """Run the checks; collective.  The findings are on rank 0, the others get none."""
    machine = explore(world, directory)
    try:
        findings = [_run(check, machine) for check in checks]
    finally:
        machine.free()
    return [finding for finding in findings if finding is not None]


def _run(check: Check, machine: Machine) -> Finding | None:
    """Run one check within its time limit; collective."""
    limit = threading.Timer(LIMIT, _stuck, [check.name, machine.world.rank])
    limit.daemon = True
    limit.start()
    try:
        facts = check.probe(machine)
        machine.meet()
        told = machine.world.gather(facts)
    finally:
        limit.cancel()
    return None if told is None else check.judge(told, machine.job)


def _stuck(name: str, rank: int) -> None:
    """End the job: a check that hangs has found the problem."""
    text = f"mpipar doctor: rank {rank} (process {os.getpid()}) is stuck in the check {name!r}"
    end_job(f"{text} for {LIMIT:.0f} s. Try fewer ranks, or the ranks of one node", 1)
