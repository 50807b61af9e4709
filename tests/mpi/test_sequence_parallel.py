"""Models whose activations between the layers are blocks of the sequence, against the dense ones.

Everything is compared: loss, every gradient slice, norm, one step of the optimiser.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition, rng
from mpipar.autograd import Tape, Tensor, recompute
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build, generate, stages
from mpipar.nn import Module
from mpipar.optim import AdamW
from mpipar.parallel.clip import clip_factor, clip_grad_norm
from mpipar.parallel.context.attend import ring_attention
from mpipar.parallel.context.layout import context_positions
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.fsdp import FSDP
from mpipar.parallel.inject import factories
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.pipeline import Pipeline

EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
BATCH, VOCAB, LAYERS, LONGEST = 4, 67, 2, 10
GPT2: dict[str, Any] = {"model": "gpt2", "heads": 12, "kv_heads": 12}
LLAMA: dict[str, Any] = {"model": "llama", "heads": 24, "kv_heads": 12}
FAMILIES = [{**family, "tied": tied} for family in (GPT2, LLAMA) for tied in (True, False)]


def config_of(family: dict[str, Any], **changes: Any) -> ModelConfig:
    common = {
        "vocab": VOCAB, "layers": LAYERS, "dim": 48, "seq": LONGEST, "hidden": 60, "seed": 3,
        "dtype": "float64",
    }  # fmt: skip
    return ModelConfig(**{**common, **family, **changes})


def batch(seq: int, rows: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.random.default_rng(2).integers(0, VOCAB, (2, rows, seq))
    targets[1, seq // 2 :] = -100  # rows of unequal numbers of tokens
    return tokens, targets


@pytest.fixture(autouse=True)
def tape() -> Iterator[None]:
    with Tape():
        yield


def step(model: Any, tokens: np.ndarray, targets: np.ndarray, mesh: Mesh | None) -> list[float]:
    """Take one step of AdamW; return the loss and the norm before clipping."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    loss_sum, count = model.loss(tokens, targets)
    if mesh is None:
        loss = loss_sum / count
        loss.backward()
        norm = clip_grad_norm(model.parameters(), None)
    else:
        loss = token_mean(loss_sum, count, mesh.dp)
        loss.backward()
        sum_gradients(model.parameters(), mesh.dp)
        norm = clip_grad_norm(model.parameters(), None, mesh)
    optimizer.step(clip_factor(norm, 0.5))
    return [loss.item(), float(norm)]


def assert_equal_shards(local: Any, whole: Module) -> None:
    """Every gradient and every updated parameter is the slice of the dense model's."""
    full, mine = dict(whole.named_parameters()), dict(local.named_parameters())
    assert list(mine) == list(full)
    for name, param in mine.items():
        assert param.spec.name == full[name].spec.name
        for what in ("grad", "data"):
            expected = param.spec.take(getattr(full[name], what))
            got = getattr(param, what)
            np.testing.assert_allclose(got, expected, err_msg=f"{what} of {name}", **EXACT)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f['model']}-{f['tied']}")
@pytest.mark.parametrize("seq", [LONGEST, 3])
def test_a_training_step_is_that_of_the_dense_model(
    raw: MPI.Intracomm, family: dict[str, Any], seq: int
) -> None:
    tokens, targets = batch(seq)
    whole = build(config_of(family))
    expected = step(whole, tokens, targets, None)
    with Mesh(raw, tp=raw.size) as mesh:
        local = parallel(mesh, family)
        got = step(local, tokens, targets, mesh)
        np.testing.assert_allclose(got, expected, rtol=1e-12)
        assert_equal_shards(local, whole)


def parallel(mesh: Mesh, family: dict[str, Any], **changes: Any) -> Any:
    return build(config_of(family, **changes), **factories(mesh, sequence_parallel=True))


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda f: f["model"])
def test_data_parallel_over_tensor_parallel_with_accumulation(
    world: MPI.Intracomm, family: dict[str, Any]
) -> None:
    """Hooks see gradients that are summed over tp already, also where several are added up."""
    tokens, targets = batch(LONGEST, rows=8)
    whole = build(config_of(family))
    expected = step(whole, tokens, targets, None)
    for tp in (degree for degree in (1, 2) if world.size % degree == 0):
        with (
            Mesh(world, tp=tp) as mesh,
            DataParallel(parallel(mesh, family), mesh.dp, op="sum") as replica,
        ):
            optimizer = AdamW(replica.parameters(), lr=0.01)
            mine = np.arange(8)[partition.block(8, mesh.dp.size, mesh.dp.rank)]
            count = int((targets != -100).sum())
            total = 0.0
            for number, rows in enumerate(np.array_split(mine, 2)):
                with replica.no_sync() if number == 0 else nullcontext():
                    loss_sum, valid = replica.loss(tokens[rows], targets[rows])
                    loss = token_mean(loss_sum, valid, mesh.dp, total=count)
                    loss.backward()
                    total += loss.item()
            norm = clip_grad_norm(replica.parameters(), None, mesh)
            optimizer.step(clip_factor(norm, 0.5))
            np.testing.assert_allclose([total, norm], expected, rtol=1e-12)
            assert_equal_shards(replica, whole)


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda f: f["model"])
def test_dropout_and_recomputation(raw: MPI.Intracomm, family: dict[str, Any]) -> None:
    """A block of the sequence drops what the whole would drop there, the second time too."""
    tokens, targets = batch(LONGEST)
    whole = build(config_of(family, dropout=0.2))
    with rng.at(step=3, row=5):
        expected = step(whole, tokens, targets, None)
    with Mesh(raw, tp=raw.size) as mesh:
        for again in (False, True):
            local = parallel(mesh, family, dropout=0.2)
            if again:
                local.blocks = [_Recomputed(block) for block in local.blocks]
            with rng.at(step=3, row=5):
                got = step(local, tokens, targets, mesh)
            np.testing.assert_allclose(got, expected, rtol=1e-12)
            if again:
                local.blocks = [block.inner for block in local.blocks]
            assert_equal_shards(local, whole)


class _Recomputed(Module):
    def __init__(self, inner: Module) -> None:
        self.inner = inner

    def forward(self, x: Tensor, positions: np.ndarray) -> Tensor:
        return recompute(self.inner, x, positions)


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda f: f["model"])
def test_replicated_gradients_are_alike_on_all_tensor_ranks(
    raw: MPI.Intracomm, family: dict[str, Any]
) -> None:
    with Mesh(raw, tp=raw.size) as mesh:
        local = parallel(mesh, family)
        local.loss(*batch(LONGEST))[0].backward()
        replicated = [param for param in local.parameters() if not param.spec.sharded_axes]
        assert len(replicated) >= 2 * LAYERS + 1
        for param in replicated:
            low, high = (mesh.tp.all_reduce(param.grad, op=op) for op in ("min", "max"))
            assert (low == high).all(), param.spec.name


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda f: f["model"])
def test_number_of_messages(raw: MPI.Intracomm, family: dict[str, Any]) -> None:
    learned = family["model"] == "gpt2"  # positions
    with Mesh(raw, tp=raw.size) as mesh:
        loss_sum, _ = parallel(mesh, family).loss(*batch(LONGEST))
        # the embedding, two of each in a block, the logits, two in the loss
        forward = {"reduce_scatter": 1 + 2 * LAYERS, "all_gather": 2 * LAYERS + 1, "all_reduce": 2}
        assert mesh.tp.calls == (forward if raw.size > 1 else {})
        mesh.tp.calls.clear()
        loss_sum.backward()
        # inputs of column layers and logits again, gradients of row layers, embedding, positions
        gathers = (2 * LAYERS + 1) + 2 * LAYERS + 1 + learned
        backward = {"reduce_scatter": 2 * LAYERS + 1, "all_gather": gathers}
        backward["all_reduce"] = 2 * LAYERS + 1  # norms
        assert mesh.tp.calls == (backward if raw.size > 1 else {})


def test_positions_of_each_row_and_those_of_a_part_of_a_longer_sequence(
    raw: MPI.Intracomm,
) -> None:
    tokens, targets = batch(6)
    rows = np.array([[4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 9], [3] * 6])
    for family in (GPT2, LLAMA):
        for positions in (rows, rows[2]):
            whole = build(config_of(family, dropout=0.1))
            with rng.at(1, 0):
                expected, _ = whole.loss(tokens, targets, positions)
            expected.backward()
            with Mesh(raw, tp=raw.size) as mesh:
                local = parallel(mesh, family, dropout=0.1)
                with rng.at(1, 0):
                    got, _ = local.loss(tokens, targets, positions)
                got.backward()
                np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-12)
                for param, full in zip(local.parameters(), whole.parameters(), strict=True):
                    expected_grad = param.spec.take(full.grad)
                    np.testing.assert_allclose(param.grad, expected_grad, **EXACT)


def test_generation_writes_what_the_dense_model_writes(raw: MPI.Intracomm) -> None:
    prompt = np.array([5])  # shorter than the number of ranks, and longer later on
    expected = generate(build(config_of(GPT2)), prompt, 6, seed=1)
    with Mesh(raw, tp=raw.size) as mesh:
        sizes = partition.blocks(VOCAB, mesh.tp.size)
        written = generate(
            parallel(mesh, GPT2), prompt, 6, seed=1, gather=partial(mesh.tp.all_gather, sizes=sizes)
        )
        np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_stages_of_a_pipeline_send_blocks(world: MPI.Intracomm, schedule: str) -> None:
    """pp 2, tp 2: dropout on, and weight gradients that are put off in zb1p."""
    if world.size != 4:
        return
    tokens, targets = batch(LONGEST)
    count = int((targets != -100).sum())
    for family, overlap in zip(FAMILIES, (False, True, True, False), strict=True):
        whole = build(config_of(family, dropout=0.1))
        with rng.at(1, 0):
            loss = whole.loss(tokens, targets)[0] / count
        loss.backward()
        expected = dict(whole.named_parameters())
        with Mesh(world, pp=2, tp=2) as mesh:
            layers = factories(mesh, sequence_parallel=True, overlap=overlap)
            make = stages(config_of(family, dropout=0.1), 2, **layers)
            with Pipeline(make, mesh.pp, schedule, 3) as pipe:
                last = pipe.stages.get(1)

                def loss_fn(logits: Tensor, goal: np.ndarray, last: Any = last) -> Any:
                    return last.loss_of(logits, goal)[0] / count

                with rng.at(1, 0):
                    got = pipe.step(tokens, targets, loss_fn)
                np.testing.assert_allclose(got, loss.item(), rtol=1e-12)
                for name, param in pipe.named_parameters():
                    full = param.spec.take(expected[name].grad)
                    np.testing.assert_allclose(param.grad, full, err_msg=name, **EXACT)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_blocks_of_what_a_context_parallel_rank_holds(world: MPI.Intracomm, layout: str) -> None:
    """cp 2, tp 2: a rank has 5 of 10 positions for its heads, and 3 or 2 between the layers."""
    if world.size != 4:
        return
    tokens, targets = batch(LONGEST)
    for family in FAMILIES:
        whole = build(config_of(family, dropout=0.1))
        with rng.at(1, 0):
            loss = whole.loss(tokens, targets)[0]
        loss.backward()
        with Mesh(world, cp=2, tp=2) as mesh:
            over = partial(ring_attention, comm=mesh.cp, layout=layout)
            layers = factories(mesh, sequence_parallel=True, attention=over)
            local = build(config_of(family, dropout=0.1), **layers)
            mine = context_positions(LONGEST, 2, mesh.cp.rank, layout)
            with rng.at(1, 0):
                part, _ = local.loss(tokens[:, mine], targets[:, mine], mine)
            part.backward()
            total = mesh.cp.all_reduce(part.data)
            np.testing.assert_allclose(total, loss.item(), rtol=1e-12)
            sum_gradients(local.parameters(), mesh.cp)
            for param, full in zip(local.parameters(), whole.parameters(), strict=True):
                got: Any = param.grad
                np.testing.assert_allclose(got, param.spec.take(full.grad), **EXACT)


@pytest.mark.parametrize("overlap", [True, False])
def test_sharded_data_parallel_over_sequence_parallel(world: MPI.Intracomm, overlap: bool) -> None:
    """Weights are dropped between forward and backward, which reads them when they are back."""
    tokens, targets = batch(LONGEST)
    family = GPT2 if overlap else LLAMA
    whole = build(config_of(family))
    expected = step(whole, tokens, targets, None)
    with Mesh(world, tp=2 if world.size % 2 == 0 else 1) as mesh:
        layers = factories(mesh, sequence_parallel=True, overlap=overlap)
        with FSDP(build(config_of(family), **layers), mesh.dp, op="sum") as net:
            optimizer = AdamW(net.parameters(), lr=0.01)
            rows = partition.block(BATCH, mesh.dp.size, mesh.dp.rank)
            loss_sum, valid = net.loss(tokens[rows], targets[rows])
            loss = token_mean(loss_sum, valid, mesh.dp)
            loss.backward()
            norm = clip_grad_norm(net.parameters(), None, mesh)
            optimizer.step(clip_factor(norm, 0.5))
            np.testing.assert_allclose([loss.item(), norm], expected, rtol=1e-12)
            full = dict(whole.named_parameters())
            for name, shard in net.named_parameters():
                wanted = shard.spec.take(full[name].data)
                np.testing.assert_allclose(shard.data, wanted, err_msg=name, **EXACT)


def test_context_parallel_ranks_need_an_attention_that_reaches_them(
    world: MPI.Intracomm,
) -> None:
    with Mesh(world, cp=world.size) as mesh:
        if world.size > 1:
            with pytest.raises(ConfigError, match=r"attention=None.*mesh\.cp"):
                factories(mesh)
        made = factories(mesh, attention=lambda q, k, v: v)
        assert made["attention"](1, 2, 3) == 3
