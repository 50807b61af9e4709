"""A signal to one rank ends the run after its step, with a checkpoint that it goes on from."""

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpipar.train import loop
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from mpipar.train.report import Report, Row
from mpipar.train.signals import Signals

TINY = TrainConfig(
    layers=4, dim=24, heads=12, hidden=48, seq=8, batch=12, steps=5, dtype="float64",
    sample=0, eval_every=2, eval_batches=3, save_every=0,
)  # fmt: skip
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"tp": 2}, {"pp": 2}, {"fsdp": "3"}],
    3: [{}, {"tp": 3}, {"pp": 3}, {"fsdp": "2"}],
    4: [{}, {"tp": 2}, {"pp": 2, "tp": 2}, {"fsdp": "3", "tp": 2}],
}


class Told(Report):
    """Keeps what it hears of the end."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.rows: list[Row] = []

    def stopped(self, row: Row) -> None:
        """Keep it."""
        self.rows.append(row)


def stopped(config: TrainConfig, world: MPI.Intracomm, tell: Report | None = None) -> list[Row]:
    """Train as a command does; return the rows."""
    with Signals() as signals:
        return train(config, world, tell, signals)


def before(
    patch: pytest.MonkeyPatch, name: str, number: int, sign: signal.Signals, world: MPI.Intracomm
) -> None:
    """Let the last rank get a signal when `loop.<name>` is called for the number-th time."""
    original: Callable[..., Any] = getattr(loop, name)
    calls = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and world.rank == world.size - 1:
            os.kill(os.getpid(), sign)
        return original(*args, **kwargs)

    patch.setattr(loop, name, call)


def test_the_step_is_ended_and_saved_on_every_mesh(
    world: MPI.Intracomm, shared_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, data=text, eval_every=0, eval_batches=1)
    right = train(config, world)
    for number, mesh in enumerate(MESHES[world.size]):
        folder, tell = str(shared_path / f"{number}"), Told()
        with monkeypatch.context() as patch:
            before(patch, "train_step", 3, signal.SIGUSR1, world)
            rows = stopped(replace(config, save=folder, **mesh), world, tell)
        assert [row["step"] for row in rows] == [1, 2, 3], mesh
        saved = f"{folder}/step-00000003"
        assert tell.rows == [{"step": 3, "stopped": "SIGUSR1", "saved": saved}]
        rows += train(replace(config, resume=folder, **mesh), world)
        for row, expected in zip(rows, right, strict=True):
            for name in {"loss", "val_loss"} & row.keys():
                assert abs(row[name] - expected[name]) <= 1e-10 * expected[name]


def test_at_any_moment(
    world: MPI.Intracomm, shared_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, data=text)
    saving: Any = importlib.import_module("mpipar.checkpoint.save")  # a function has its name too
    write = saving.write_alone

    def write_alone(*args: Any) -> Any:
        time.sleep(0.2)
        return write(*args)

    monkeypatch.setattr(saving, "write_alone", write_alone)
    moments: dict[str, tuple[str, int, int, dict[str, Any]]] = {
        "before the first step": ("hold", 1, 0, {}),
        "during validation": ("evaluate", 1, 2, {}),
        "while a checkpoint is written": ("train_step", 2, 2, {"save_every": 1}),
        "in the last step": ("train_step", 5, 5, {}),
    }
    for moment, (name, call, step, changes) in moments.items():
        folder, tell = str(shared_path / name) + str(call), Told()
        with monkeypatch.context() as patch:
            before(patch, name, call, signal.SIGTERM, world)
            rows = stopped(replace(config, save=folder, **changes), world, tell)
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, step + 1)), moment
        assert not any("val_loss" in row for row in rows if row["step"] == step), moment
        assert [row["stopped"] for row in tell.rows] == ["SIGTERM"], moment
        assert Path(folder, "latest").read_text().strip() == f"step-{step:08d}", moment
        assert not list(Path(folder).glob(".*")), moment
        if step == 0:
            rows = train(replace(config, resume=folder, steps=1), world)
            assert [row["step"] for row in rows if "loss" in row] == [1]


def test_without_checkpoints_it_ends_too(
    world: MPI.Intracomm, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Told()
    before(monkeypatch, "train_step", 2, signal.SIGTERM, world)
    stopped(replace(TINY, data=text), world, tell)
    assert tell.rows == [{"step": 2, "stopped": "SIGTERM", "saved": None}]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_goes_on_without_saving_says_so(
    world: MPI.Intracomm, shared_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tell = str(shared_path / "run"), Told()
    train(replace(TINY, data=text, steps=2, save=folder), world)
    before(monkeypatch, "train_step", 2, signal.SIGTERM, world)
    stopped(replace(TINY, data=text, steps=9, resume=folder), world, tell)
    assert tell.rows == [{"step": 4, "stopped": "SIGTERM", "saved": None}]
