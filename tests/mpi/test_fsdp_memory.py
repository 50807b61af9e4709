"""FSDP: what a rank really holds (the system's count) beside what memory_stats says."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.autograd import add_pump
from mpipar.bench.train_memory import forget_peak

SIZES = [(512, 50), (1024, 14)]  # features, units: 210 and 235 MB of weights, gradients, moments
ROWS = 4
TRIES = 3  # MPI or pytest may allocate a megabyte of its own meanwhile, once
MEGABYTE = 1 << 20
COUNTS = Path("/proc/self/smaps_rollup")


def counted() -> dict[str, int]:
    """Return bytes of this process by kind, what it shares with others divided among them."""
    lines = (line.split() for line in COUNTS.read_text().splitlines())
    return {words[0]: int(words[1]) << 10 for words in lines if words[0].startswith("Pss")}


def allocated_bytes() -> int:
    """Return what this process has allocated, for itself and in shared memory.

    Not the pages of programs and libraries: how many processes share those changes all the time,
    by megabytes, whatever this one does.
    """
    now = counted()
    return now["Pss_Anon:"] + now["Pss_Shmem:"]


class Chain(mp.nn.Module):
    """Equal units, and nothing else."""

    def __init__(self, width: int, units: int) -> None:
        self.blocks = [
            mp.nn.Linear(width, width, bias=False, seed=0, name=f"blocks.{n}") for n in range(units)
        ]

    def forward(self, x: Any) -> Any:
        for unit in self.blocks:
            x = unit(x).tanh()
        return (x * x).sum()


def train(width: int, units: int, comm: mp.Communicator, steps: int, look: Any) -> Any:
    """Take steps; call `look` between some nodes of backward and after each update."""
    net = mp.FSDP(Chain(width, units), comm, mp.FsdpConfig(), op="sum")
    optimizer = mp.optim.AdamW(net.parameters(), lr=1e-3)
    x = mp.Tensor(np.full((ROWS, width), 0.5, np.float32))
    nodes = count()
    pump = add_pump(lambda: next(nodes) % 9 or look())  # reading takes the system milliseconds
    for _ in range(steps):
        net.zero_grad()
        net(x).backward()
        optimizer.step()
        look()
    pump.remove()
    return net, optimizer


@pytest.mark.parametrize(("width", "units"), SIZES)
def test_what_the_system_counts(world: MPI.Intracomm, width: int, units: int) -> None:
    """A rank needs 16 bytes a parameter / ranks x 1.05, two gathered units, and activations.

    Many units with the next one on its way, or few that are too large for that.
    """
    if not COUNTS.exists() or "Pss_Anon:" not in counted():
        pytest.skip("the system does not count shared memory by process and kind")
    total, activations = units * width * width, units * 2 * 4 * ROWS * width
    line = 16 * total / world.size * 1.05 + 2 * 4 * width * width + activations
    for _ in range(TRIES):
        measured, told = measure(world, width, units)
        told += activations
        if world.allreduce(measured <= line, MPI.LAND):
            break
    assert measured <= line
    assert measured == pytest.approx(told, rel=0.05)


def measure(world: MPI.Intracomm, width: int, units: int) -> tuple[int, float]:
    """Return the bytes of training that the system counts on this rank, and those told."""
    with mp.Communicator(world) as comm:
        # what a process has anyway: code, MPI's buffers
        net, optimizer = train(width, 2, comm, 2, lambda: None)
        net.destroy()
        del net, optimizer
        forget_peak()
        world.Barrier()
        base, seen = allocated_bytes(), []
        net, optimizer = train(width, units, comm, 2, lambda: seen.append(allocated_bytes()))
        moments = sum(array.nbytes for array in optimizer.state_dict().values())
        told = net.memory_stats()["peak_memory_mb"] * MEGABYTE + moments
        net.destroy()
    return max(seen) - base, told
