"""A step with a gradient that is not finite on one rank is skipped by all; too many end the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.autograd import Function
from mpipar.errors import NonFiniteError
from mpipar.train import held as held_module
from mpipar.train import loop
from mpipar.train.agree import is_of_all_ranks
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train

TINY = TrainConfig(
    layers=4, dim=24, heads=12, hidden=48, seq=8, batch=12, steps=4, dtype="float64",
    sample=0, eval_every=0, eval_batches=1, save_every=1,
)  # fmt: skip
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"dtype": "bfloat16"}],
    2: [{}, {"tp": 2}, {"pp": 2}, {"fsdp": "3"}],
    3: [{}, {"tp": 3}, {"pp": 3}, {"fsdp": "2", "dtype": "bfloat16"}],
    4: [{"dtype": "bfloat16"}, {"tp": 2}, {"pp": 2, "tp": 2}, {"fsdp": "3", "tp": 2}],
}


class Poison(Function):
    """The same value, with a gradient that is not finite."""

    value = np.inf

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Return it."""
        return x.copy()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Spoil the gradient."""
        return grad * Poison.value


@pytest.fixture
def text(shared_path: Path, world: MPI.Intracomm) -> str:
    """A short text that all ranks read."""
    path = shared_path / "text.txt"
    if world.rank == 0:
        path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(200)))
    world.barrier()
    return str(path)


class Spoiled:
    """Spoils the last rank's gradient in some steps; before, after: the state around them."""

    def __init__(self, patch: pytest.MonkeyPatch, world: MPI.Intracomm, steps: set[int]) -> None:
        """Put itself in the way of the loss and of each step."""
        self.world, self.steps, self.now = world, steps, 0
        self.pairs: list[tuple[list[Any], list[Any]]] = []
        self.share, self.step = held_module.token_share, loop.train_step
        patch.setattr(held_module, "token_share", self.share_of)
        patch.setattr(loop, "train_step", self.take)

    def share_of(self, loss_sum: Any, total: int) -> Any:
        """Return the loss, on the last rank and in the chosen steps with a bad gradient."""
        term = self.share(loss_sum, total)
        last = self.world.rank == self.world.size - 1
        return Poison.apply(term) if last and self.now in self.steps else term

    def take(self, step: int, parts: Any, held: Any, optimizer: Any, *args: Any) -> Any:
        """Take a step, and keep the state before and after one with a bad gradient."""
        self.now = step

        def state() -> list[Any]:
            arrays = [param.data for param in held.parameters()]
            return [np.array(a) for a in [*arrays, *optimizer.state_dict().values()]]

        earlier = state()
        taken = self.step(step, parts, held, optimizer, *args)
        if step in self.steps:
            assert taken.wrong == "grad_norm"
            self.pairs.append((earlier, state()))
        return taken


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_all_ranks_skip_a_step(
    world: MPI.Intracomm, text: str, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(Poison, "value", value)
    for mesh in MESHES[world.size]:
        with monkeypatch.context() as patch:
            spoiled = Spoiled(patch, world, {2})
            rows = train(replace(TINY, data=text, **mesh), world)
        assert [row["skipped"] for row in rows if "loss" in row] == [0, 1, 1, 1], mesh
        assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row), mesh
        assert np.isfinite([row["grad_norm"] for row in rows if "loss" in row]).sum() == 3, mesh
        ((earlier, later),) = spoiled.pairs
        for one, other in zip(earlier, later, strict=True):
            np.testing.assert_array_equal(one, other)


def test_too_many_in_a_row_end_the_run(
    world: MPI.Intracomm, shared_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, data=text, max_skipped=2, steps=9)
    folder = shared_path / "run"
    with monkeypatch.context() as patch:
        Spoiled(patch, world, {2, 4, 5})
        words = r"grad_norm=.*step 5, the last of 2 in a row"
        with pytest.raises(NonFiniteError, match=words) as bad:
            train(replace(config, save=str(folder)), world)
        assert is_of_all_ranks(bad.value)
        assert f"--resume {folder / 'step-00000003'}, the last good checkpoint" in str(bad.value)
        assert (folder / "latest").read_text().strip() == "step-00000003"
        with pytest.raises(NonFiniteError, match="No checkpoint is older"):
            train(config, world)
        Spoiled(patch, world, {4, 5})
        ends = shared_path / "ends"
        train(replace(config, save=str(ends), steps=5, max_skipped=9, keep=1), world)
        found = sorted(path.name for path in ends.iterdir())
        assert found == ["latest", "step-00000003", "step-00000005"]  # older ones stay
    rows = train(replace(config, resume=str(folder)), world)
    assert [row["skipped"] for row in rows if "loss" in row] == [1] * 6
