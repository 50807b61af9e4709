"""FSDP: after steps of AdamW the weights are those of one process with the whole batch."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.models.config import ModelConfig
from mpipar.optim import AdamW
from mpipar.partition import block

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD", "HYBRID_SHARD")
ROWS, STEPS = 12, 5


def config(strategy: str, comm: mp.Communicator, **more: Any) -> mp.FsdpConfig:
    """Return settings; HYBRID_SHARD cuts over two ranks where there is an even number."""
    size = (2 if comm.size % 2 == 0 else 1) if strategy == "HYBRID_SHARD" else None
    how = {"min_param_size": 20, **more}
    return mp.FsdpConfig(sharding_strategy=strategy, shard_size=size, **how)


class Layer(mp.nn.Module):
    """A norm, whose weights stay whole, and an odd number of elements."""

    def __init__(self, name: str, shared: mp.nn.Module) -> None:
        self.norm = mp.nn.LayerNorm(6, name=f"{name}.norm", dtype="float64")
        self.up = mp.nn.Linear(6, 11, seed=0, name=f"{name}.up", dtype="float64")
        self.down = mp.nn.Linear(11, 6, bias=False, seed=0, name=f"{name}.down", dtype="float64")
        self.shared = shared

    def forward(self, x: Any) -> Any:
        h = self.up(self.norm(x)).tanh()
        return x + self.shared(self.down(h)) + (h @ self.down.weight.T).tanh()


class Net(mp.nn.Module):
    """Five blocks that share a layer, a weight of exactly 512 bytes, and odd ones.

    Weights are used through views (`.T`), which backward keeps.
    """

    def __init__(self) -> None:
        self.first = mp.nn.Linear(6, 6, seed=0, name="first", dtype="float64")
        shared = mp.nn.Linear(6, 6, seed=0, name="shared", dtype="float64")
        self.blocks = [Layer(f"blocks.{n}", shared) for n in range(5)]
        self.bucket = mp.nn.Parameter(np.linspace(-1, 1, 64).reshape(8, 8))  # 512 bytes
        self.scale = mp.nn.Parameter(np.array(1.5))
        self.nothing = mp.nn.Parameter(np.zeros((2, 0)))
        self.never = mp.nn.Parameter(np.ones((5, 5)))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.blocks:
            x = layer(x)
        x = self.first(x) * self.scale  # used twice
        return x + (self.bucket @ self.bucket).sum() + self.nothing.sum()


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((ROWS, 6)), rng.standard_normal((ROWS, 6))) for _ in range(count)]


def share_of(net: Any, batch: tuple[np.ndarray, np.ndarray], rows: slice) -> Any:
    """Return this rank's term of the mean over the whole batch."""
    x, y = batch
    error = net(mp.Tensor(x[rows])) - y[rows]
    return (error * error).sum() / ROWS


@cache
def dense(accumulate: int, clip: float | None) -> dict[str, np.ndarray]:
    """Return the weights of one process with the whole batches."""
    net = Net()
    optimizer = AdamW(net.parameters(), lr=0.01)
    given = iter(batches(STEPS * accumulate))
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(accumulate):
            share_of(net, next(given), slice(0, ROWS)).backward()
        if clip is not None:
            mp.clip_grad_norm(net.parameters(), clip)
        optimizer.step()
    return net.state_dict()


def sharded(net: Any, comm: mp.Communicator, accumulate: int, how: str, mesh: Any = None) -> None:
    """Take the same steps; how: "each" backward reduces, or the "last" one, or "by hand"."""
    optimizer = AdamW(net.parameters(), lr=0.01)
    rows = block(ROWS, comm.size, comm.rank)
    given = iter(batches(STEPS * accumulate))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number in range(accumulate):
            alone = how == "by hand" or (how == "last" and number < accumulate - 1)
            with net.no_sync() if alone else nullcontext():
                share_of(net, next(given), rows).backward()
        if how == "by hand":
            net.sync_gradients()
        if mesh is not None:
            mp.clip_grad_norm(net.parameters(), 0.5, mesh)
        optimizer.step()


def assert_equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12, err_msg=name)


def cases(strategy: str, comm: str) -> tuple[tuple[int, str, dict[str, Any]], ...]:
    """Return two of the ways to take steps; each strategy has all of them, on some ranks or other.

    Each is (parts of a step, when they are reduced, settings).
    """
    small = 512 / 2**20  # MB: the size of net.bucket
    added_up: tuple[tuple[int, str, dict[str, Any]], ...] = (
        (3, "each", {"flatten_parameters": False}),
        (3, "last", {"bucket_mb": small}),
        (3, "by hand", {"bucket_mb": 4 * small}),
    )
    which = STRATEGIES.index(strategy) + ("self", "world", "half").index(comm)
    return (1, "last", {"bucket_mb": small}), added_up[which % 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_those_of_one_process(
    comm: mp.Communicator, strategy: str, request: pytest.FixtureRequest
) -> None:
    for accumulate, how, more in cases(strategy, request.node.callspec.params["raw"]):
        net = mp.FSDP(Net(), comm, config(strategy, comm, **more), op="sum")
        sharded(net, comm, accumulate, how)
        got = net.full_state_dict()
        assert_equal(got, dense(accumulate, None))
        assert dict(net.named_parameters())["never"].grad is None
        net.destroy()
        assert_equal(net.module.state_dict(), got)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_is_that_of_the_whole_gradient(world: MPI.Intracomm, strategy: str) -> None:
    with mp.Mesh(world, cp=2 if world.size % 2 == 0 else 1) as mesh:
        both = mesh.group("dp", "cp")
        flatten = strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD")
        how = config(strategy, both, flatten_parameters=flatten, min_param_size=0)
        for accumulate in (1, 3):
            with mp.FSDP(Net(), both, how, op="sum") as net:
                sharded(net, both, accumulate, "last", mesh)
                assert_equal(net.full_state_dict(), dense(accumulate, 0.5))


def language_model(model: str) -> Any:
    sizes = {"vocab": 37, "layers": 3, "dim": 16, "heads": 4, "seq": 8}
    kv = 2 if model == "llama" else 4
    return mp.models.build(ModelConfig(model=model, kv_heads=kv, dtype="float64", **sizes))


@pytest.mark.parametrize(
    ("model", "strategies"),
    [
        ("gpt2", ("FULL_SHARD", "SHARD_OPTIMIZER", "HYBRID_SHARD")),
        ("llama", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    ],
)
def test_language_models(world: MPI.Intracomm, model: str, strategies: tuple[str, ...]) -> None:
    comm = mp.Communicator(world)
    tokens = np.random.default_rng(5).integers(0, 37, (STEPS, ROWS, 9))

    def steps(net: Any, rows: slice) -> None:
        optimizer = AdamW(net.parameters(), lr=0.01)
        for batch in tokens:
            optimizer.zero_grad()
            loss, count = net.loss(batch[rows, :-1], batch[rows, 1:])
            mean = mp.token_mean(loss, count, comm) if rows.stop - rows.start < ROWS else loss / 96
            mean.backward()
            optimizer.step()

    whole = language_model(model)
    steps(whole, slice(0, ROWS))
    for strategy in strategies:
        net = mp.FSDP(language_model(model), comm, config(strategy, comm), op="sum")
        steps(net, block(ROWS, comm.size, comm.rank))
        assert_equal(net.full_state_dict(), whole.state_dict())
        net.destroy()
    comm.destroy()
