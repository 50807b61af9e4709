"""Both model families with their sequences spread over ranks, against the dense model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition, rng
from mpipar.autograd import Tape
from mpipar.models import ModelConfig, build
from mpipar.parallel.clip import clip_grad_norm
from mpipar.parallel.context.attend import attention_over
from mpipar.parallel.context.layout import LAYOUTS, context_positions
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh

SEQ = 13
FAMILIES: list[dict[str, Any]] = [
    {"model": "gpt2", "heads": 8, "kv_heads": 8, "tied": True, "dropout": 0.1},
    {"model": "llama", "heads": 8, "kv_heads": 4, "tied": False},
]


@pytest.fixture(autouse=True)
def tape() -> Iterator[None]:
    with Tape():
        yield


def config_of(family: dict[str, Any]) -> ModelConfig:
    common = {"vocab": 31, "layers": 2, "dim": 32, "seq": SEQ, "hidden": 40, "seed": 3}
    return ModelConfig(**common, dtype="float64", **family)


def batch() -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.random.default_rng(2).integers(0, 31, (2, 4, SEQ))
    targets[1, 2:9] = -100
    return tokens, targets


def shapes(ranks: int) -> list[dict[str, int]]:
    """Meshes with cp above 1, where the ranks allow it."""
    found = [{"cp": ranks}]
    if ranks == 4:
        found += [{"cp": 2, "tp": 2}, {"cp": 2, "dp": 2}]
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model"])
def test_loss_and_gradients_are_those_of_the_dense_model(
    world: MPI.Intracomm, family: dict[str, Any]
) -> None:
    tokens, targets = batch()
    whole = build(config_of(family))
    with rng.at(1, 0):
        loss_sum, count = whole.loss(tokens, targets)
    expected = loss_sum / count
    expected.backward()
    full = dict(whole.named_parameters())
    for shape in shapes(world.size):
        with Mesh(world, **shape) as mesh:
            data = mesh.group("dp", "cp")
            rows = partition.block(4, mesh.dp.size, mesh.dp.rank)
            for layout in LAYOUTS:
                made = factories(mesh, attention=attention_over(mesh, layout))
                local = build(config_of(family), **made)
                at = context_positions(SEQ, mesh.cp.size, mesh.cp.rank, layout)
                with rng.at(1, rows.start):
                    loss_sum, count = local.loss(tokens[rows][:, at], targets[rows][:, at], at)
                loss = token_mean(loss_sum, count, data)
                loss.backward()
                sum_gradients(local.parameters(), data)
                np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-12)
                for name, own in local.named_parameters():
                    grad = own.spec.take(full[name].grad)
                    message = f"{name} in {layout} on {shape}"
                    np.testing.assert_allclose(
                        own.grad, grad, rtol=1e-10, atol=1e-12, err_msg=message
                    )
                norm = clip_grad_norm(local.parameters(), None, mesh)
                np.testing.assert_allclose(
                    norm, clip_grad_norm(whole.parameters(), None), rtol=1e-11
                )
