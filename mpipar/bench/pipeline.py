"""`mpipar bench pipeline`: how long the ranks of a pipeline are idle, beside the simulation.

Each schedule runs on all ranks on a stack of square layers, float32.  The simulation is fed with
the measured times of the same step's actions, so what is left between the two shares is what the
execution itself costs: messages, waiting, and the collectives at the ends of a step.  Of several
steps the fastest counts.
"""

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
    simulated_idle: float
    ratio: float  # of the two shares


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
    chunks = PIPELINES[schedule].chunks or 2
    x = np.ones((microbatches * rows // chunks, dim), np.float32)
    best: Row | None = None
    with Pipeline(lambda n: Stack(n, dim), comm, schedule, microbatches) as pipeline:
        for _ in range(STEPS):
            pipeline.zero_grad()
            pipeline.step(x, x, lambda y, _: (y * y).sum())
            timeline = pipeline.gather_timeline()
            share = idle(timeline)
            plain = pipeline.schedule.computation()
            expected = simulate(plain, measured=measured(timeline)).bubble
            ratio = share / expected if expected else 1.0
            sizes = schedule, comm.size, microbatches, timeline.makespan
            if best is None or timeline.makespan < best.step_s:
                best = Row(*sizes, share, expected, ratio)
    assert best is not None
    return best


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in rows]
