"""Can checkpoints be written: the folder is there on all nodes, is the same, and MPI-IO works.

Rank 0 writes a token that all must read.  Then all ranks write one file through MPI-IO, as a
checkpoint is, each its own part, and each reads that of its neighbour.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpipar.doctor.finding import Check, Facts, Finding, Job, size, who
from mpipar.doctor.machine import Machine

PART = 1 << 22  # bytes a rank
PATIENCE = 2.0  # seconds for a shared file system to show another node's file
LITTLE = 1 << 30  # bytes free


def probe(machine: Machine) -> Facts:
    """Write and read; what goes wrong is told, never raised on some ranks only."""
    world, folder = machine.world, machine.directory
    name = f".mpipar-doctor-{world.bcast(os.getpid())}"
    facts: Facts = {"directory": str(folder), "error": _mark(folder / name, world.rank)}
    facts |= {"free": None, "bytes_per_s": None}
    there = world.bcast(not facts["error"])
    if there and not facts["error"]:
        facts["error"] = _read_mark(folder / name)
        facts["free"] = shutil.disk_usage(folder).free if folder.is_dir() else None
    if not world.allreduce(bool(facts["error"]), MPI.LOR):
        facts |= _through_mpi(machine, folder / f"{name}-data")
    machine.meet()
    if world.rank == 0 and there:
        (folder / name).unlink(missing_ok=True)
    return facts


def _mark(path: Path, rank: int) -> str:
    """Let rank 0 write its token; return "" or what went wrong."""
    if rank != 0:
        return "" if path.parent.is_dir() else "there is no such folder"
    try:
        path.write_text(path.name)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _read_mark(path: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return "" if path.read_text() == path.name else "it holds another file there"
        except OSError as error:
            if time.monotonic() > deadline:
                return f"what rank 0 writes is not seen here ({error.strerror})"
        time.sleep(0.05)


def _through_mpi(machine: Machine, path: Path) -> Facts:
    """Write and read a file of all ranks; collective."""
    world = machine.world
    mine = np.full(PART, world.rank % 251, np.uint8)
    theirs = np.empty_like(mine)
    neighbour = (world.rank + 1) % world.size
    try:
        file = MPI.File.Open(world, str(path), MPI.MODE_CREATE | MPI.MODE_RDWR)
        start = time.perf_counter()
        file.Write_at_all(world.rank * PART, [mine, MPI.BYTE])
        file.Sync()
        seconds = time.perf_counter() - start
        machine.meet()
        file.Read_at_all(neighbour * PART, [theirs, MPI.BYTE])
        file.Close()
    except MPI.Exception as error:
        return {"error": f"MPI-IO fails: {error}"}
    machine.meet()
    if world.rank == 0:
        path.unlink(missing_ok=True)
    if not (theirs == neighbour % 251).all():
        return {"error": f"MPI-IO reads back other bytes than rank {neighbour} wrote"}
    return {"bytes_per_s": world.size * PART / seconds}


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say where checkpoints cannot be written."""
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    directory = told[0]["directory"]
    broken = [rank for rank, one in enumerate(told) if one["error"]]
    if broken:
        words = f"{directory}: {told[broken[0]]['error']} ({who(broken)} on {job.hosts[broken[0]]})"
        fix = "Name a folder with --dir that all nodes share and that can be written"
        return Finding("checkpoints", "problem", words, fix, facts)
    free = min(one["free"] for one in told)
    rate = min(one["bytes_per_s"] for one in told)
    words = f"{directory}: {rate / 1e6:,.0f} MB/s by all ranks through MPI-IO, {size(free)} free"
    if free < LITTLE:
        fix = "Make room: a checkpoint of a model in float32 takes 12 bytes a parameter"
        return Finding("checkpoints", "note", words, fix, facts)
    return Finding("checkpoints", "ok", words, "", facts)


CHECK = Check("checkpoints", probe, judge)
