"""Predicted beside measured: a few steps of a layout on the ranks of a real job.

Memory is counted by `tracemalloc`, which NumPy reports to, so that other load on the machine does
not matter: what stays between steps (weights, gradients, optimiser, buffers) and the peak of a step
(activations too).  Times are the middle of several steps, of which
the slowest rank counts.
"""

import gc
import os
import time
import tracemalloc
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpipar.comm import node
from mpipar.comm.choice import read_table, table_path
from mpipar.kernels import native
from mpipar.kernels.matmul.blas import product
from mpipar.optim import SGD, AdamW
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.context.layout import context_positions
from mpipar.parallel.mesh import Mesh
from mpipar.plan import machine
from mpipar.plan.communication import Links
from mpipar.plan.layout import Job, Layout
from mpipar.plan.machine import Machine
from mpipar.plan.search import Plan, predict
from mpipar.train import heap
from mpipar.train.agree import together
from mpipar.train.config import TrainConfig
from mpipar.train.data import Rows
from mpipar.train.held import Held, hold
from mpipar.train.step import train_step

if TYPE_CHECKING:
    from mpi4py import MPI

STEPS = 5  # that are timed
SMALL, LARGE, ROUNDS = 8, 1 << 20, 20  # of messages that are measured
RATES = ("flops", "attention_flops", "memory_bandwidth")
SIDE, PRODUCTS, SLICES = 512, 4, 30  # of products between which ranks meet


class Found(NamedTuple):
    """What was predicted and measured, by name: bytes, and seconds of a step."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else 1.0


def settings(job: Job, layout: Layout) -> TrainConfig:
    """Return the settings of training for a layout."""
    model = job.model
    parts: dict[str, Any] = {"accumulate": layout.microbatches}
    if layout.pp > 1:
        parts = {"microbatches": layout.microbatches, "schedule": layout.schedule}
        parts["chunks"] = layout.chunks if layout.schedule == "interleaved" else None
    names = ("layers", "dim", "heads", "hidden", "vocab", "seq", "tied", "dropout")
    return TrainConfig(
        **{name: getattr(model, name) for name in names},
        **{axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp")},
        **parts,
        model=model.model,  # type: ignore[arg-type]
        dtype=model.dtype,  # type: ignore[arg-type]
        kv_heads=model.kv_heads,
        batch=job.batch,
        fsdp=str(layout.fsdp) if layout.fsdp else "none",  # type: ignore[arg-type]
        cp_layout=layout.cp_layout if layout.cp > 1 else None,  # type: ignore[arg-type]
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        warmup=0,
        steps=STEPS,
    )


def measured_machine(job: Job, layout: Layout, world: "MPI.Intracomm") -> Machine:
    """Collective: return the mean speeds of all ranks, and of their messages.

    As many ranks measure at a time as there are cores, with the threads that they train with.
    Ranks of a mesh meet many times in a step, and then wait for the one that was slower this time:
    their speeds are lower by what that costs.
    """
    _begin(world)
    with Communicator(world, name="speeds") as comm:  # sets threads; its waits leave the cores
        nodes = comm.process_group.nodes
        cores = _cores(nodes)
        mine, found = nodes.local_rank // cores, Machine()
        for turn in range(max(1, -(-nodes.local_size // cores))):
            comm.barrier()
            if turn == mine:
                found = machine.measure(job.model, None, layout.tokens(job))
        comm.barrier()
        names = [name for name in sorted(vars(found)) if name != "cores"]
        mean = np.mean(world.allgather([getattr(found, name) for name in names]), axis=0)
        speeds = dict(zip(names, mean.tolist(), strict=True))
        waiting = _waiting(comm, world)
        for name in RATES:
            speeds[name] /= waiting
        alpha, large = (_message(comm, size) for size in (SMALL, LARGE))
    speeds["alpha_intra"] = alpha
    speeds["beta_intra"] = max(0.0, large - alpha) / LARGE
    return Machine(**speeds, cores=cores)


def _mean(one: Machine, other: Machine) -> Machine:
    """Return a machine whose seconds for anything are the mean of two."""
    speeds = {}
    for name, value in vars(one).items():
        values = np.array([value, getattr(other, name)])
        speeds[name] = float(1 / np.mean(1 / values) if name in RATES else np.mean(values))
    return Machine(**speeds)


def _begin(world: "MPI.Intracomm") -> None:
    """Collective: do what training does before it begins."""
    heap.keep_freed()
    together(world, native.compile_cpu)
    together(world, lambda: read_table(table_path()))


def _cores(nodes: node.Nodes) -> int:
    """Return the cores of this node: those that its ranks may run on, all or their own."""
    mine = node.cores()
    return mine if mine == os.cpu_count() else mine * nodes.local_size


def _waiting(comm: Communicator, world: "MPI.Intracomm") -> float:
    """Collective: return how much longer slices of work take whose ranks meet behind each.

    It is the mean of the slowest rank's seconds over the middle one of all.
    """
    x = np.ones((SIDE, SIDE), np.float32)
    out, times = np.empty_like(x), []
    for _ in range(SLICES):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            product(x, x, out)
        times.append(time.perf_counter() - start)
    everyone = np.array(world.allgather(times))  # (ranks, slices)
    return float(everyone.max(axis=0).mean() / np.median(everyone))


def _message(comm: Communicator, nbytes: int) -> float:
    """Collective: return the middle seconds of a message between the first two ranks."""
    data, times = np.zeros(nbytes, np.uint8), [0.0]
    if comm.rank < 2 <= comm.size:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            comm.sendrecv(data, 1 - comm.rank, src=1 - comm.rank)
            times.append(time.perf_counter() - start)
    comm.barrier()
    return float(comm.all_reduce(np.array([median(times)]), "max")[0])


def check(
    job: Job, layout: Layout, world: "MPI.Intracomm", speeds: Machine, again: bool = False
) -> list[Found]:
    """Collective: run a layout; return predictions and measurements, on every rank.

    again: measure the speeds once more behind the steps, and predict from the mean: a machine may
    be faster or slower by then.
    Raises ConfigError on every rank for what training refuses.
    """
    config = settings(job, layout)
    config.validate(world.size)
    _begin(world)
    tracemalloc.start()
    try:
        with Mesh(world, layout.pp, layout.dp, layout.cp, layout.tp) as mesh:
            held = hold(config, mesh)
            optimizer = _optimizer(job, held)
            parts = _data(config, job, layout, mesh)
            sizes = _memory(held, optimizer, parts, mesh)
            tracemalloc.stop()
            seconds = _time(held, optimizer, parts, mesh)
            held.destroy()
    finally:
        tracemalloc.stop()
    if again:
        speeds = _mean(speeds, measured_machine(job, layout, world))
    predicted = predict(job, layout, Links(speeds, world.size, world.size))
    mine = np.array([*sizes, seconds])
    everyone = np.array(world.allgather(mine))
    return _rows(predicted, everyone)


def _optimizer(job: Job, held: Held) -> Any:
    kind = AdamW if job.optimizer == "adamw" else SGD
    return kind(held.parameters(), 1e-4)


def _data(config: TrainConfig, job: Job, layout: Layout, mesh: Mesh) -> list[Rows]:
    """Return this rank's micro-batches of one step, of random tokens."""
    tokens = np.random.default_rng(0).integers(0, config.vocab, (job.batch, config.seq + 1))
    at = context_positions(config.seq, layout.cp, mesh.cp.rank, config.layout)
    mine = np.array_split(np.arange(job.batch), layout.dp)[mesh.dp.rank]
    count = 1 if layout.pp > 1 else layout.microbatches
    return [
        Rows(int(rows[0]), tokens[rows][:, at], tokens[rows][:, at + 1], at)
        for rows in np.array_split(mine, count)
    ]


def _memory(held: Held, optimizer: Any, parts: list[Rows], mesh: Mesh) -> list[float]:
    """Run two steps; return the bytes that stay after one, and the most during another."""
    train_step(1, parts, held, optimizer, mesh, 1.0)
    gc.collect()
    stays = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    train_step(2, parts, held, optimizer, mesh, 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    shared = _shared(held)
    return [float(stays + shared), float(peak + shared)]


def _shared(held: Held) -> int:
    """Return the bytes of gradients in memory that ranks share, of which nobody told tracemalloc.

    The sums there cannot be written; each rank has as much for its own part of them.
    """
    found = 0
    for part in held.parts:
        for param in part.parameters():
            if param.grad is not None and not param.grad.flags.writeable:
                found += param.grad.nbytes
    return found


def _time(held: Held, optimizer: Any, parts: list[Rows], mesh: Mesh) -> float:
    """Return the middle seconds of some steps."""
    times = []
    for step in range(3, 3 + STEPS):
        mesh.world.barrier()
        start = time.perf_counter()
        train_step(step, parts, held, optimizer, mesh, 1.0)
        times.append(time.perf_counter() - start)
    return median(times)


def _rows(predicted: Plan, everyone: np.ndarray) -> list[Found]:
    """Return what there is to compare, each of the rank that needs most."""
    between, peak, seconds = everyone.max(axis=0)
    held = predicted.memory
    stays = held.total - held.activations
    return [
        Found("bytes between steps", stays, between),
        Found("bytes at the peak", held.total, peak),
        Found("seconds of a step", predicted.step, seconds),
    ]
