"""Training with experts gives the same numbers for every layout, and says what depends on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.autograd import Tensor, no_grad
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build
from mpipar.parallel.experts.block import ExpertBlock
from mpipar.parallel.experts.moe import MoE, balance_loss
from mpipar.parallel.fsdp import FSDP
from mpipar.parallel.inject import factories
from mpipar.parallel.mesh import Mesh
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from mpipar.train.report import Report
from tests.mpi.test_train_layouts import assert_same

TINY = TrainConfig(
    layers=4,
    dim=24,
    seq=18,
    batch=8,
    steps=3,
    dtype="float64",
    seed=1,
    sample=3,
    dropout=0.1,
    eval_batches=2,
    experts=5,
    balance=0.1,
)
SINGLE: dict[str, Any] = {"pp": 1, "cp": 1, "tp": 1, "ep": 1, "sequence_parallel": False}
SINGLE |= {"schedule": None, "microbatches": None, "recompute": False}


def equal_to_one_rank(world: MPI.Intracomm, config: TrainConfig, **alone: Any) -> None:
    assert_same(train(config, world), train(replace(config, **SINGLE, **alone), MPI.COMM_SELF))


def layouts(ranks: int) -> list[dict[str, Any]]:
    """Return meshes of this number of ranks over which experts are spread."""
    if ranks == 4:
        return [
            {"ep": 4},
            {"tp": 2, "ep": 2, "sequence_parallel": True, "model": "llama", "shared": 8},
            {"cp": 2, "ep": 4},
            {"cp": 2, "tp": 2, "ep": 2, "recompute": True},
        ]
    return [{"ep": ranks}, {"cp": ranks, "ep": ranks, "recompute": True}]


def test_full_experts_drop_the_same_tokens(world: MPI.Intracomm, text: str) -> None:
    for layout in layouts(world.size):
        config = replace(TINY, data=text, capacity_factor=0.7, **layout)
        try:
            equal_to_one_rank(world, config)
        except BaseException as error:
            error.add_note(f"layout: {layout}")
            raise


def test_micro_batches_of_a_pipeline_are_balanced_each(world: MPI.Intracomm, text: str) -> None:
    """One rank that accumulates over the same micro-batches minimises the same."""
    if world.size == 1:
        pytest.skip("a pipeline needs two ranks")
    config = replace(TINY, data=text, layers=2 * world.size, pp=world.size)
    for schedule, again in (("1f1b", True), ("zb1p", False)):
        piped = replace(config, schedule=schedule, microbatches=3, recompute=again)
        equal_to_one_rank(world, piped, accumulate=3)
    if world.size == 4:
        piped = replace(config, pp=2, tp=2, schedule="zbv", microbatches=4, capacity_factor=0.8)
        equal_to_one_rank(world, piped, accumulate=4)


def test_accumulation_without_balance_changes_nothing(world: MPI.Intracomm, text: str) -> None:
    config = replace(TINY, data=text, balance=0.0, accumulate=2, ep=world.size)
    equal_to_one_rank(world, config, accumulate=1)


def test_balance_and_capacity_matter(world: MPI.Intracomm, text: str) -> None:
    config = replace(TINY, data=text, steps=2)
    plain = train(config, MPI.COMM_SELF)
    for other in ({"balance": 0.0}, {"capacity_factor": 0.5}, {"top_k": 1}, {"shared": 4}):
        assert train(replace(config, **other), MPI.COMM_SELF)[1]["loss"] != plain[1]["loss"], other
    free = train(replace(config, balance=0.0), MPI.COMM_SELF)
    assert free[0]["loss"] == plain[0]["loss"]  # the cross-entropy alone is shown


class Kept(Report):
    """Keeps the text."""

    sample = ""

    def end(self, sample: str) -> None:
        self.sample = sample


def test_the_text_is_the_same(world: MPI.Intracomm, text: str) -> None:
    config = replace(TINY, data=text, steps=2, sample=12)
    alone, together = Kept(), Kept()
    train(config, MPI.COMM_SELF, alone)
    train(replace(config, ep=world.size, capacity_factor=None), world, together)
    assert together.sample == alone.sample
    assert len(alone.sample) > 12


@pytest.mark.parametrize("fsdp", ["none", "3"])
def test_ranks_without_held_out_sequences(world: MPI.Intracomm, text: str, fsdp: Any) -> None:
    config = replace(TINY, data=text, seq=30, batch=4, steps=1, eval_batches=3, fsdp=fsdp)
    short = Path(text).read_text()[:950]  # 95 held out: 3 sequences, for up to 4 ranks
    if world.rank == 0:
        Path(text).write_text(short)
    world.barrier()
    ep = world.size if fsdp == "none" else 1
    assert_same(
        train(replace(config, ep=ep), world), train(replace(config, fsdp="none"), MPI.COMM_SELF)
    )


def test_the_output_carries_the_balance_loss(world: MPI.Intracomm) -> None:
    """Gradients are those of loss + balance * balance_loss, computed openly."""
    values = np.random.default_rng(world.rank).standard_normal((2, 5, 6))
    with Mesh(world, ep=world.size) as mesh:
        how: dict[str, Any] = {"name": "moe", "seed": 3, "dtype": "float64"}
        block = ExpertBlock(6, 8, 5, 2, mesh.ep, **how)
        plain = MoE(6, 8, 5, 2, mesh.ep, **how)
        block.balance_per_token = 0.3 / (10 * world.size)
        one, other = Tensor(values, requires_grad=True), Tensor(values, requires_grad=True)
        block(one, np.arange(5)).sum().backward()
        (plain(other).sum() + balance_loss(plain) * 0.3).backward()
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-12, atol=1e-14)
        for ours, right in zip(block.parameters(), plain.parameters(), strict=True):
            np.testing.assert_allclose(ours.grad, right.grad, rtol=1e-12, atol=1e-14)
        assert not balance_loss(block).requires_grad
        block.eval()
        block.capacity_factor = 0.1
        with no_grad():
            block(values, np.arange(5))
        assert block.dropped == 0


def test_a_model_of_ones_own(world: MPI.Intracomm) -> None:
    config = ModelConfig(vocab=7, layers=1, dim=8, heads=2, seq=4, experts=4, dtype="float64")
    with Mesh(world, ep=world.size) as mesh:
        model = build(config, **factories(mesh), recompute=True)
        loss, count = model.loss(np.ones((1, 4), int), np.ones((1, 4), int))
        loss.backward()
        assert count == 4
        assert np.isfinite(loss.item())


def test_spread_experts_are_not_sharded_again(world: MPI.Intracomm) -> None:
    with Mesh(world, ep=world.size) as mesh:
        layer = MoE(6, 8, 5, 2, mesh.ep, name="moe", seed=3)
        if world.size == 1:
            FSDP(layer, mesh.dp).destroy()
            return
        with pytest.raises(ConfigError, match=r"up=.*experts over ep"):
            FSDP(layer, mesh.dp)


def test_refused_on_every_rank(world: MPI.Intracomm, text: str) -> None:
    with pytest.raises(ConfigError, match=r"ep=7.*Pass --ep"):
        train(replace(TINY, data=text, ep=7), world)
    with pytest.raises(ConfigError, match=r"top_k=6.*experts=5"):
        train(replace(TINY, data=text, top_k=6), world)
