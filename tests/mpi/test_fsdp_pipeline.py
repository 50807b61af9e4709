"""FSDP of the stages of a pipeline: the gradients are those of one process, for every schedule."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.partition import block

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD", "HYBRID_SHARD")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
ROWS, MICROBATCHES = 12, 4


class Layer(mp.nn.Module):
    """A norm, whose weights stay whole, and weights that are used through views, or twice."""

    def __init__(self, name: str) -> None:
        self.norm = mp.nn.LayerNorm(6, name=f"{name}.norm", dtype="float64")
        self.up = mp.nn.Linear(6, 11, seed=0, name=f"{name}.up", dtype="float64")
        self.down = mp.nn.Linear(11, 6, bias=False, seed=0, name=f"{name}.down", dtype="float64")

    def forward(self, x: Any) -> Any:
        h = self.up(self.norm(x)).tanh()
        return x + self.down(h) + (h @ self.down.weight.T).tanh()


class Layers(mp.nn.Module):
    """Some of the layers of the model."""

    def __init__(self, numbers: range) -> None:
        self.blocks = [Layer(f"layer{n}") for n in numbers]

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, mp.Tensor) else mp.Tensor(x)
        for layer in self.blocks:
            x = layer(x)
        return x


def squares(y: Any, target: Any) -> Any:
    error = y - target
    return (error * error).sum()


def batches(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    for _ in range(count):
        yield rng.standard_normal((ROWS, 6)), rng.standard_normal((ROWS, 6))


def dense(layers: int) -> list[dict[str, np.ndarray]]:
    """Return the gradients of each batch, of one process, by global name."""
    found = []
    for x, y in batches(2):
        whole = Layers(range(layers))
        squares(whole(x), y).backward()
        found.append({param.spec.name: param.grad for param in whole.parameters()})
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_process(world: MPI.Intracomm, schedule: str) -> None:
    """Two steps of each strategy, over the stages of all ranks, or of pairs."""
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    for dp in (1, 2):
        if world.size % dp or (world.size // dp == 1 and chunks > 1):
            continue
        with mp.Mesh(world, pp=world.size // dp, dp=dp) as mesh:
            wanted = dense(2 * mesh.pp.size * chunks)
            for strategy in STRATEGIES:
                size = dp if strategy == "HYBRID_SHARD" else None
                how = mp.FsdpConfig(strategy, size, 20, flatten_parameters=strategy < "NO")
                take_steps(mesh, schedule, how, wanted)


def take_steps(mesh: mp.Mesh, schedule: str, how: mp.FsdpConfig, wanted: Any) -> None:
    """Compare the gradients of two steps, and after them the loss of a pass without gradients."""

    def stage(number: int) -> mp.FSDP:
        return mp.FSDP(Layers(range(2 * number, 2 * number + 2)), mesh.dp, how, op="sum")

    mine = block(ROWS, mesh.dp.size, mesh.dp.rank)
    with mp.Pipeline(stage, mesh.pp, schedule, MICROBATCHES) as pipe:
        for (x, y), expected in zip(batches(2), wanted, strict=True):
            pipe.zero_grad()
            loss = pipe.step(x[mine], y[mine], squares)
            for name, param in pipe.named_parameters():
                value = param.spec.take(expected[param.spec.name])
                np.testing.assert_allclose(param.grad, value, atol=1e-12, rtol=1e-9, err_msg=name)
        with mp.no_grad():
            assert pipe.step(x[mine], y[mine], squares) == pytest.approx(loss, rel=1e-12)
        for part in pipe.stages.values():
            part.destroy()
