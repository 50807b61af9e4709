"""Both model families built from parallel layers, against the dense model of the same seed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition, rng
from mpipar.autograd import Tape, Tensor
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build
from mpipar.nn import Linear, Module
from mpipar.optim import AdamW
from mpipar.parallel.clip import clip_grad_norm
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
BATCH, SEQ, VOCAB, LAYERS = 4, 6, 67, 2  # 67 divides over nothing

GPT2: dict[str, Any] = {"model": "gpt2", "heads": 12, "kv_heads": 12, "tied": True}
LLAMA: dict[str, Any] = {"model": "llama", "heads": 24, "kv_heads": 12, "tied": False}


def config_of(family: dict[str, Any], **changes: Any) -> ModelConfig:
    common = {
        "vocab": VOCAB, "layers": LAYERS, "dim": 48, "seq": SEQ, "hidden": 60, "seed": 3,
        "dtype": "float64",
    }  # fmt: skip
    return ModelConfig(**{**common, **family, **changes})


def batch() -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.random.default_rng(2).integers(0, VOCAB, (2, BATCH, SEQ))
    targets[1, 2:] = -100  # rows of unequal numbers of tokens
    return tokens, targets


@pytest.fixture(autouse=True)
def tape() -> Iterator[None]:
    with Tape():
        yield


def meshes(raw: MPI.Intracomm) -> Iterator[Mesh]:
    shapes = [{"tp": raw.size}, {"tp": 1}] + [{"tp": 2}] * (raw.size == 4)
    for shape in shapes:
        with Mesh(raw, **shape) as mesh:
            yield mesh


def step(model: Any, tokens: np.ndarray, targets: np.ndarray, mesh: Mesh | None) -> list[float]:
    """Take one step of AdamW; return the loss and the norm before clipping."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    loss_sum, count = model.loss(tokens, targets)
    if mesh is None:
        loss = loss_sum / count
        loss.backward()
        norm = np.sqrt(sum((param.grad**2).sum() for param in model.parameters()))
        for param in model.parameters():
            param.grad *= min(0.5 / (norm + 1e-6), 1)
    else:
        loss = token_mean(loss_sum, count, mesh.dp)
        loss.backward()
        sum_gradients(model.parameters(), mesh.dp)
        norm = clip_grad_norm(model.parameters(), 0.5, mesh)
    optimizer.step()
    return [loss.item(), float(norm)]


def assert_equal_shards(local: Module, whole: Module) -> None:
    """Every gradient and every updated parameter is the slice of the dense model's."""
    full = dict(whole.named_parameters())
    mine = dict(local.named_parameters())
    assert list(mine) == list(full)
    for name, param in mine.items():
        assert param.spec.name == full[name].spec.name
        for what in ("grad", "data"):
            expected = param.spec.take(getattr(full[name], what))
            got = getattr(param, what)
            np.testing.assert_allclose(got, expected, err_msg=f"{what} of {name}", **EXACT)


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda family: family["model"])
def test_a_training_step_is_that_of_the_dense_model(
    raw: MPI.Intracomm, family: dict[str, Any]
) -> None:
    tokens, targets = batch()
    whole = build(config_of(family))
    expected = step(whole, tokens, targets, None)
    for mesh in meshes(raw):
        local = build(config_of(family), **factories(mesh))
        rows = partition.block(BATCH, mesh.dp.size, mesh.dp.rank)
        got = step(local, tokens[rows], targets[rows], mesh)
        np.testing.assert_allclose(got, expected, rtol=1e-12)
        assert_equal_shards(local, whole)


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda family: family["model"])
def test_replicated_gradients_are_alike_on_all_tensor_ranks(
    raw: MPI.Intracomm, family: dict[str, Any]
) -> None:
    with Mesh(raw, tp=raw.size) as mesh:
        local = build(config_of(family), **factories(mesh))
        loss_sum, _ = local.loss(*batch())
        loss_sum.backward()
        checked = 0
        for param in local.parameters():
            if not param.spec.sharded_axes:
                low = mesh.tp.all_reduce(param.grad, op="min")
                assert (low == mesh.tp.all_reduce(param.grad, op="max")).all(), param.spec.name
                checked += 1
        assert checked >= 2 * LAYERS + 1


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda family: family["model"])
def test_number_of_messages(raw: MPI.Intracomm, family: dict[str, Any]) -> None:
    with Mesh(raw, tp=raw.size) as mesh:
        local, many = build(config_of(family), **factories(mesh)), int(raw.size > 1)
        loss_sum, _ = local.loss(*batch())
        # the embedding, two in each block, two in the loss
        assert mesh.tp.calls.total() == many * (1 + 2 * LAYERS + 2)
        before = mesh.tp.calls.total()
        loss_sum.backward()
        # the logits, two in each block
        assert mesh.tp.calls.total() - before == many * (1 + 2 * LAYERS)
        assert set(mesh.tp.calls) <= {"all_reduce"}


def test_dropout_masks_do_not_depend_on_the_mesh(raw: MPI.Intracomm) -> None:
    tokens, targets = batch()
    with rng.at(step=1, row=0):
        expected, _ = build(config_of(GPT2, dropout=0.2)).loss(tokens, targets)
    with Mesh(raw, tp=raw.size) as mesh, rng.at(step=1, row=0):
        got, _ = build(config_of(GPT2, dropout=0.2), **factories(mesh)).loss(tokens, targets)
        np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-12)


def test_heads_that_do_not_divide_are_an_error_on_every_rank(raw: MPI.Intracomm) -> None:
    if raw.size == 1:
        return
    heads = raw.size + 1  # 8 * heads features divide over 2 and 4 ranks, heads do not
    changes = {"heads": heads, "kv_heads": heads, "dim": 12 * heads, "hidden": 12 * raw.size}
    with Mesh(raw, tp=raw.size) as mesh, pytest.raises(ConfigError):
        build(config_of(GPT2, **changes), **factories(mesh)).loss(*batch())


def test_roles(raw: MPI.Intracomm) -> None:
    with Mesh(raw, tp=raw.size) as mesh:
        linear = factories(mesh)["linear"]
        assert isinstance(linear("dense", 4, 4, seed=1, name="a"), Linear)
        with pytest.raises(ConfigError, match="role='diagonal'"):
            linear("diagonal", 4, 4)


def test_the_gradient_does_not_grow_with_the_tensor_ranks(raw: MPI.Intracomm) -> None:
    """One loss that p ranks hold is one loss: the embedding's gradient is that of one rank."""
    with Mesh(raw, tp=raw.size) as mesh:
        table = factories(mesh)["embedding"](4 * raw.size, 3, seed=1, name="t", dtype="float64")
        table(np.array([0])).sum().backward()
        total = mesh.tp.all_reduce(np.array([table.weight.grad.sum()]))
        assert total == 3.0
        assert isinstance(table.weight, Tensor)
