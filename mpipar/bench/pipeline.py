"""`mpipar bench pipeline`: how long the ranks of a pipeline are idle, beside the simulation.

Each schedule runs on all ranks on a stack of square layers, float32.  The simulation is fed with
measured times: of the same step's actions, of what its ranks spent on starting messages, and of
what a message of that size takes on its way between two ranks that wait for it.  `plain_idle` is
the simulated share without the latter two.  What is left between the two shares is what the
execution itself costs.  Of several steps the fastest counts.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpipar import nn
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline import Pipeline
from mpipar.parallel.pipeline.timeline import measured
from mpipar.schedule.pipeline import PIPELINES, idle, simulate
from mpipar.train import heap

STEPS = 5
LAYERS = 2  # of a stage


@dataclass(frozen=True)
class Row:
    """One schedule: seconds of a step and shares of the ranks' time in which no action runs."""

    schedule: str
    ranks: int
    microbatches: int
    step_s: float
    idle: float
    simulated_idle: float  # with messages as measured
    plain_idle: float  # simulated, with messages that take no time
    message_s: float  # of a message on its way
    ratio: float  # of the first two shares


class Stack(nn.Module):
    """A stage: layers of dim features, (rows, dim) to (rows, dim)."""

    def __init__(self, number: int, dim: int) -> None:
        """Make stage `number`."""
        self.layers = [
            nn.Linear(dim, dim, seed=1, name=f"stage{number}.{i}") for i in range(LAYERS)
        ]

    def forward(self, x: Any) -> Tensor:
        """Run the layers one after the other."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def measure(comm: Communicator, schedule: str, microbatches: int, dim: int, rows: int) -> Row:
    """Collective: return the row of a schedule, the same on every rank.

    rows: of a micro-batch.  Layers have dim features; a stage has fewer rows where a rank holds
    several, so that all schedules do the same work.
    """
    heap.keep_freed()  # as in training
    chunks = PIPELINES[schedule].chunks or 2
    x = np.ones((microbatches * rows // chunks, dim), np.float32)
    message = flight(comm, x[: rows // chunks])
    best: Row | None = None
    with Pipeline(lambda n: Stack(n, dim), comm, schedule, microbatches) as pipeline:
        for _ in range(STEPS):
            pipeline.zero_grad()
            pipeline.step(x, x, lambda y, _: (y * y).sum())
            timeline = pipeline.gather_timeline()
            share = idle(timeline)
            times = measured(pipeline.gather_timeline(messages=True))
            plain = simulate(pipeline.schedule, measured=measured(timeline)).bubble
            expected = simulate(pipeline.schedule, send=message, measured=times).bubble
            ratio = share / expected if expected else 1.0
            sizes = schedule, comm.size, microbatches, timeline.makespan
            if best is None or timeline.makespan < best.step_s:
                best = Row(*sizes, share, expected, plain, message, ratio)
    assert best is not None
    return best


def flight(comm: Communicator, x: np.ndarray, repeats: int = 20) -> float:
    """Collective: return the seconds that an array like x is on its way to a rank that waits.

    The median round trip between ranks 0 and 1 counts, halved, less what they took to start.
    """
    seconds = np.zeros(1)
    if comm.rank < 2 <= comm.size:
        other, found = 1 - comm.rank, []
        for _ in range(repeats):
            start = time.perf_counter()
            receive = comm.recv(x.shape, x.dtype, other, async_op=True)
            post = time.perf_counter() - start
            if comm.rank:
                receive.wait()
            start = time.perf_counter()
            send = comm.send(x, other, async_op=True)
            post += time.perf_counter() - start
            if not comm.rank:
                receive.wait()
                found.append((time.perf_counter() - start) / 2 - post / 2)
            send.wait()
        seconds[0] = max(statistics.median(found), 0.0) if found else 0.0
    return float(comm.broadcast(seconds, src=0)[0])


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in rows]
