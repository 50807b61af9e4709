"""Transformers in stages, with tensor and data parallel ranks: the numbers of one process."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import models, partition, rng
from mpipar.autograd import Tensor
from mpipar.errors import StateError
from mpipar.models import ModelConfig, stages
from mpipar.parallel.clip import clip_grad_norm
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.fsdp import FSDP, FsdpConfig
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.pipeline import Pipeline

ROWS, SEQ, VOCAB = 13, 6, 11
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")


def config(**options: Any) -> ModelConfig:
    base: dict[str, Any] = {"layers": 4, "dim": 8, "heads": 2, "seq": SEQ, "vocab": VOCAB}
    return ModelConfig(**{**base, "dtype": "float64", "dropout": 0.2, **options})


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Some targets do not count: the micro-batches have unequal numbers of tokens."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCAB, (ROWS, SEQ))
    targets = draw.integers(0, VOCAB, (ROWS, SEQ))
    targets[draw.random((ROWS, SEQ)) < 0.3] = -100
    return tokens, targets


@cache
def alone(made: ModelConfig) -> tuple[float, float, dict[str, Any]]:
    """Return loss, norm and gradients of one process with the whole batch."""
    model = models.build(made)
    with rng.at(3, 0):
        loss_sum, count = model.loss(*batch())
        loss = loss_sum / count
        loss.backward()
    norm = clip_grad_norm(model.parameters(), None)
    return loss.item(), norm, {name: p.grad for name, p in model.named_parameters()}


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def run(
    mesh: Mesh,
    made: ModelConfig,
    schedule: str,
    m: int,
    wrap: Callable[..., Any],
    sequence: bool = False,
    compare: bool = True,
) -> None:
    """Take a step on a mesh of pp, dp and tp; compare everything with one process.

    compare: the gradients too; else their norm is enough.
    """
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    make = stages(made, mesh.pp.size * chunks, **factories(mesh, sequence_parallel=sequence))
    tokens, targets = batch()
    count = int((targets != -100).sum())
    mine = partition.block(ROWS, mesh.dp.size, mesh.dp.rank)
    expected_loss, expected_norm, gradients = alone(made)
    with Pipeline(lambda n: wrap(make(n)), mesh.pp, schedule, m) as pipe:
        last: Any = pipe.stages.get(pipe.schedule.stages - 1)

        def loss_fn(logits: Tensor, goal: np.ndarray) -> Tensor:
            loss_sum, valid = last.loss_of(logits, goal)
            return token_mean(loss_sum, valid, mesh.dp, total=count)

        with rng.at(3, mine.start):
            loss = pipe.step(tokens[mine], targets[mine], loss_fn)
        close(loss, expected_loss)
        for name, param in pipe.named_parameters() if compare else ():
            close(param.grad, param.spec.take(gradients[name]))
        close(clip_grad_norm(pipe.parameters(), None, mesh), expected_norm)
        if mesh.world.size == 1:
            close(clip_grad_norm(pipe.parameters(), None), expected_norm)
        for stage in pipe.stages.values():
            getattr(stage, "destroy", lambda: None)()


def shapes(p: int) -> Iterator[dict[str, int]]:
    """Yield meshes of pp with dp and tp for p ranks."""
    yield {"pp": p}
    if p == 4:
        yield {"pp": 2, "tp": 2}
        yield {"pp": 2, "dp": 2}
    if p > 1:
        yield {"dp": p}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_meshes(world: MPI.Intracomm, schedule: str) -> None:
    """GPT-2 style and tied, Llama style and not."""
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    for number, shape in enumerate(shapes(world.size)):
        with Mesh(world, timeout=60.0, **shape) as mesh:
            wrap = (lambda x: DataParallel(x, mesh.dp, op="sum")) if mesh.dp.size > 1 else _same
            for model, tied, m in (("gpt2", True, 3), ("llama", False, 2), ("llama", True, 1)):
                layers = 2 * chunks if number else world.size * chunks
                run(mesh, config(model=model, tied=tied, layers=layers), schedule, m, wrap)


def _same(module: Any) -> Any:
    return module


def test_parts_of_the_sequence_between_stages(world: MPI.Intracomm) -> None:
    """The ranks of a tensor group hold 3 and 3, or 2, 2, 1, 1 of 6 tokens."""
    for shape in ({"pp": 1, "tp": world.size}, {"pp": 2, "tp": world.size // 2}):
        if world.size % shape["pp"] or shape["tp"] not in (1, 2, 4):
            continue
        with Mesh(world, timeout=60.0, **shape) as mesh:
            for model, schedule in (("gpt2", "1f1b"), ("llama", "zb1p")):
                made = config(model=model, layers=2, heads=4, tied=False)
                run(mesh, made, schedule, 3, _same, sequence=True)


def test_sharded_stages(world: MPI.Intracomm) -> None:
    """FSDP of every stage, tied tables among them: loss and norm."""
    if world.size not in (2, 4):
        return
    with Mesh(world, timeout=60.0, pp=world.size // 2, dp=2) as mesh:
        for strategy, schedule in (("SHARD_GRAD_OP", "1f1b"), ("FULL_SHARD", "zb1p")):
            settings = FsdpConfig(sharding_strategy=strategy, min_param_size=1)

            def wrap(stage: Any, settings: FsdpConfig = settings) -> FSDP:
                blocks = list(getattr(stage.blocks, "values", lambda b=stage.blocks: b)())
                return FSDP(stage, mesh.dp, settings, units=blocks, op="sum")

            run(mesh, config(layers=2), schedule, 3, wrap, compare=False)


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
def test_gradients_of_replicas_add_up_over_steps(world: MPI.Intracomm, schedule: str) -> None:
    """The backwards of stages begin and end in any order, and several replicas hear of each."""
    made = config(layers=8, tied=False)
    make = stages(made, world.size * (2 if schedule == "zbv" else 1))
    tokens, targets = batch()
    count, gradients = int((targets != -100).sum()), alone(made)[2]
    with (
        Mesh(world, pp=world.size, timeout=60.0) as mesh,
        Pipeline(lambda n: DataParallel(make(n), mesh.dp, op="sum"), mesh.pp, schedule, 4) as pipe,
    ):
        last: Any = pipe.stages.get(pipe.schedule.stages - 1)
        for step in (1, 2):
            with rng.at(3, 0):
                pipe.step(tokens, targets, lambda y, t: last.loss_of(y, t)[0] / count)
            for name, param in pipe.named_parameters():
                close(param.grad, step * param.spec.take(gradients[name]))
        for stage in pipe.stages.values():
            stage.destroy()


def test_tied_gradients_add_up_over_steps(world: MPI.Intracomm) -> None:
    tokens, targets = batch()
    made = config(model="gpt2", dropout=0.0)
    model = models.build(made)
    for _ in range(2):
        model.loss(tokens, targets)[0].backward()
    expected = dict(model.named_parameters())
    p = world.size
    with Mesh(world, pp=p) as mesh, Pipeline(stages(made, p), mesh.pp, "1f1b", 3) as pipe:
        last: Any = pipe.stages.get(p - 1)
        for _ in range(2):
            pipe.step(tokens, targets, lambda y, t: last.loss_of(y, t)[0])
        for name, param in pipe.named_parameters():
            close(param.grad, expected[name].grad)
        held = p > 1 and mesh.pp.rank in (0, p - 1)
        assert pipe.tied == (("token_embedding.weight",) if held else ())


def test_tied_gradients_of_replicas_are_cleared_first(world: MPI.Intracomm) -> None:
    if world.size != 4:
        return
    tokens, targets = batch()
    made = config(model="gpt2")
    with Mesh(world, pp=2, dp=2) as mesh:
        make = stages(made, 2)
        replicas: list[Any] = []

        def build(number: int) -> Any:
            replicas.append(DataParallel(make(number), mesh.dp, op="sum"))
            return replicas[-1]

        with Pipeline(build, mesh.pp, "1f1b", 3) as pipe:
            last: Any = pipe.stages.get(1)
            loss_fn = lambda y, t: last.loss_of(y, t)[0]  # noqa: E731
            pipe.step(tokens, targets, loss_fn)
            with pytest.raises(StateError, match="Clear the gradients"):
                pipe.step(tokens, targets, loss_fn)
            pipe.zero_grad()
            pipe.step(tokens, targets, loss_fn)
            replicas[0].destroy()
