"""Pipelines against the whole model: losses, gradients, the order in which actions run, memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpipar import nn, rng
from mpipar.autograd import Tensor, no_grad
from mpipar.autograd import functional as F
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline import Pipeline
from mpipar.schedule.pipeline import make, peak_live, pipelines

WIDTH = 6


class Layer(nn.Module):
    """A part of a small MLP, (rows, 6) to (rows, 6), with two kinds of parameters and dropout."""

    def __init__(self, number: int, dropout: float = 0.0) -> None:
        name = f"layer{number}"
        self.norm = nn.LayerNorm(WIDTH, name=f"{name}.norm", dtype="float64")
        self.linear = nn.Linear(WIDTH, WIDTH, seed=3, name=f"{name}.linear", dtype="float64")
        self.dropout = nn.Dropout(dropout, seed=5, name=f"{name}.dropout")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(self.linear(self.norm(x)))) + x


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(rows)
    return draw.normal(size=(rows, WIDTH)), draw.normal(size=(rows, WIDTH))


def squares(y: Tensor, target: np.ndarray) -> Tensor:
    return ((y - target) ** 2).sum()


def dense(count: int, rows: int, dropout: float = 0.0) -> tuple[float, list[list[Any]]]:
    """Return the loss and, for each layer, the gradients of the whole model."""
    layers = [Layer(number, dropout) for number in range(count)]
    x, targets = data(rows)
    y: Any = x
    for layer in layers:
        y = layer(y)
    loss = squares(y, targets)
    loss.backward()
    return loss.item(), [[param.grad for param in layer.parameters()] for layer in layers]


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def check(pipe: Pipeline, gradients: list[list[Any]]) -> None:
    """Compare the gradients of this rank's stages with those of the whole model."""
    for number, module in pipe.stages.items():
        for param, expected in zip(module.parameters(), gradients[number], strict=True):
            close(param.grad, expected)


def cases(p: int) -> Iterator[tuple[str, int, int]]:
    """Yield (schedule, stages, micro-batches)."""
    for name in pipelines():
        for m in (1, 3, 4, 8):
            for chunks in (1, 2, 3) if name == "interleaved" else (2,) if name == "zbv" else (1,):
                yield name, p * chunks, m


def test_every_schedule_gives_the_numbers_of_the_whole_model(comm: Communicator) -> None:
    """8 rows, and 9, where the micro-batches are of two sizes; two steps each."""
    for name, count, m in cases(comm.size):
        stages = [Layer(number) for number in range(count)]
        with Pipeline(stages, comm, name, m) as pipe:
            for rows in (8, 9, 8):
                x, targets = data(rows)
                loss, gradients = dense(count, rows)
                close(pipe.step(x, targets, squares), loss)
                check(pipe, gradients)
                pipe.zero_grad()
            plain = pipe.schedule.computation()
            assert pipe.executed == plain.actions[comm.rank]
            assert pipe.peak_live == peak_live(plain)[comm.rank]
            assert plain == make(name, comm.size, m, count // comm.size)


def test_only_the_ends_need_data(comm: Communicator) -> None:
    count, rows = comm.size, 7
    x, targets = data(rows)
    loss, gradients = dense(count, rows)
    with Pipeline(Layer, comm, "1f1b", 4) as pipe:
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        arguments = x if first else None, targets if last else None, squares if last else None
        for _ in range(2):  # gradients add up
            close(pipe.step(*arguments), loss)
        for param in pipe.parameters():
            param.grad /= 2
        check(pipe, gradients)
        with no_grad():
            close(pipe.step(*arguments), loss)
        check(pipe, gradients)
        assert pipe.peak_live == 0


def test_dropout_is_that_of_the_whole_batch(comm: Communicator) -> None:
    for name in ("1f1b", "zb1p"):
        with Pipeline(lambda n: Layer(n, 0.3), comm, name, 3) as pipe:
            with rng.at(4, 20):
                loss, gradients = dense(comm.size, 8, 0.3)
                close(pipe.step(*data(8), squares), loss)
            check(pipe, gradients)


def test_forward_and_backward_by_hand(comm: Communicator) -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb1p", "zbv"):
        chunks = 2 if name in ("interleaved", "zbv") else 1
        count = comm.size * chunks
        x, targets = data(7)
        loss, gradients = dense(count, 7)
        with Pipeline([Layer(n) for n in range(count)], comm, name, 4) as pipe:
            y = pipe.forward(x)
            grad = None
            if comm.rank == pipe.schedule.placement[-1]:
                out = Tensor(y, requires_grad=True)
                total = squares(out, targets)
                total.backward()
                close(total.item(), loss)
                grad = out.grad
            else:
                assert y is None
            pipe.backward(grad)
            check(pipe, gradients)
