"""Training gives the same numbers for every layout, and its errors reach every rank together."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.errors import ConfigError, MismatchError, NonFiniteError
from mpipar.optim import SGD
from mpipar.parallel.mesh import Mesh
from mpipar.train.agree import is_of_all_ranks
from mpipar.train.config import TrainConfig
from mpipar.train.data import Rows
from mpipar.train.held import hold
from mpipar.train.loop import train
from mpipar.train.report import Row
from mpipar.train.step import train_step

TINY = TrainConfig(
    layers=2, dim=48, heads=4, seq=16, batch=8, steps=5, dtype="float64", seed=1, sample=4
)


def assert_same(rows: list[Row], expected: list[Row], tolerance: float = 1e-10) -> None:
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, right in zip(rows, expected, strict=True):
        for name in ("step", "loss", "grad_norm", "lr", "val_loss"):
            if name in right:
                assert abs(row[name] - right[name]) <= tolerance * abs(right[name]), (name, row)


def sizes(model: str, tp: int) -> dict[str, Any]:
    """Return settings that `tp` ranks can share."""
    heads = 6 if tp == 3 else 8
    kv = {"kv_heads": heads // 2, "hidden": 96} if model == "llama" else {}
    return {"model": model, "tp": tp, "heads": heads, **kv}


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_mesh_gives_the_same_losses(
    world: MPI.Intracomm, text: str, model: str, tp: int
) -> None:
    if world.size % tp:
        pytest.skip(f"{world.size} ranks are no multiple of tp={tp}")
    config = replace(TINY, data=text, **sizes(model, tp))
    expected = train(replace(config, tp=1), MPI.COMM_SELF)
    rows = train(config, world)
    assert_same(rows, expected)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5]
    assert expected[4]["loss"] < expected[0]["loss"]


def test_accumulation_and_dropout_give_the_same_losses(world: MPI.Intracomm, text: str) -> None:
    tp = 2 if world.size % 2 == 0 else 1
    config = replace(TINY, data=text, dropout=0.2, steps=3)
    expected = train(config, MPI.COMM_SELF)
    assert_same(train(replace(config, tp=tp, accumulate=2), world), expected)
    assert expected[0]["loss"] != train(replace(config, seed=2), MPI.COMM_SELF)[0]["loss"]


def test_float32_and_reproducible(world: MPI.Intracomm, text: str) -> None:
    config = replace(TINY, data=text, dtype="float32", reproducible=True, check_collectives=True)
    expected = train(replace(config, reproducible=False), MPI.COMM_SELF)
    first, second = train(config, world), train(config, world)
    assert_same(first, expected, 1e-4)
    assert [row["loss"] for row in first[:5]] == [row["loss"] for row in second[:5]]


def test_bfloat16_learns(world: MPI.Intracomm, text: str) -> None:
    rows = train(replace(TINY, data=text, dtype="bfloat16", steps=8, lr=1e-2), world)
    assert rows[-2]["loss"] < rows[0]["loss"]


def rows_with_masks(count: int, seq: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets (count, seq); row i has only i + 1 valid targets."""
    generator = np.random.default_rng(5)
    inputs = generator.integers(0, 256, (count, seq))
    targets = generator.integers(0, 256, (count, seq))
    targets[np.arange(seq) > np.arange(count)[:, None]] = -100
    return inputs, targets


def one_step(comm: MPI.Intracomm, cuts: list[slice]) -> tuple[float, float, int, list[np.ndarray]]:
    """Take a step over these cuts of the batch; return its numbers and the gradients."""
    inputs, targets = rows_with_masks(9)
    parts = [Rows(cut.start, inputs[cut], targets[cut], np.arange(16)) for cut in cuts]
    with Mesh(comm) as mesh:
        held = hold(TINY, mesh)
        optimizer = SGD(held.parameters(), lr=0.1)
        numbers = train_step(1, parts, held, optimizer, mesh, clip=0.0)
        gradients = [np.array(param.grad) for param in held.parameters()]
        held.destroy()
        return numbers.loss, numbers.norm, numbers.tokens, gradients


def test_micro_batches_of_different_token_counts(world: MPI.Intracomm) -> None:
    loss, norm, tokens, gradients = one_step(MPI.COMM_SELF, [slice(0, 9)])
    assert tokens == 45
    bounds = np.linspace(0, 9, 2 * world.size + 1).astype(int)  # two unequal parts a rank
    cuts = [slice(a, b) for a, b in pairwise(bounds)]
    mine = cuts[2 * world.rank : 2 * world.rank + 2]
    got_loss, got_norm, got_tokens, got = one_step(world, mine)
    assert got_tokens == tokens
    assert abs(got_loss - loss) < 1e-12 * loss
    assert abs(got_norm - norm) < 1e-12 * norm
    for ours, right in zip(got, gradients, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-14)


def test_a_loss_that_is_not_finite_is_an_error_on_every_rank(
    world: MPI.Intracomm, text: str
) -> None:
    config = replace(TINY, data=text, dtype="float32", lr=1e30, clip=0.0, warmup=0)
    config = replace(config, max_skipped=2)
    with pytest.raises(NonFiniteError, match=r"(loss|grad_norm)=.*step.*--lr") as caught:
        train(config, world)
    assert is_of_all_ranks(caught.value)


def test_other_settings_on_one_rank(world: MPI.Intracomm, text: str) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    config = replace(TINY, data=text, seed=int(world.rank == world.size - 1))
    with pytest.raises(MismatchError, match=r"configuration differs.*rank"):
        train(config, world)


def test_other_data_on_one_rank(world: MPI.Intracomm, tmp_path: Path) -> None:
    if world.size < 3:
        pytest.skip("with two ranks nobody knows who is odd")
    (tmp_path / "text").write_text("same " * 100 if world.rank != 1 else "other" * 100)
    paths = world.allgather(str(tmp_path / "text"))
    config = replace(TINY, data=paths[0])
    with pytest.raises(MismatchError, match=r"training data differs.*rank 1 against"):
        train(Elsewhere(config, paths[world.rank]), world)


class Elsewhere(TrainConfig):
    """The same settings, with the data at another place on this machine."""

    def __init__(self, config: TrainConfig, path: str) -> None:
        super().__init__(**{**vars(config), "data": path})

    def fingerprint(self) -> str:
        return "equal"


def test_data_missing_on_one_rank(world: MPI.Intracomm, text: str, tmp_path: Path) -> None:
    here = text if world.rank else str(tmp_path / "missing.txt")
    with pytest.raises(ConfigError) as caught:
        train(Elsewhere(TINY, here), world)
    assert "no such file" in str(caught.value)
    assert world.size == 1 or "(rank 0)" in str(caught.value)


def test_a_mesh_that_does_not_fit(world: MPI.Intracomm, text: str) -> None:
    with pytest.raises(ConfigError, match="dp=7"):
        train(replace(TINY, data=text, dp=7), world)
