"""A run that goes on from a checkpoint is the one that never stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import CheckpointError, ConfigError
from mpipar.train.again import going_on
from mpipar.train.agree import is_of_all_ranks
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train

TINY = TrainConfig(
    layers=4, dim=24, heads=12, hidden=48, seq=8, batch=12, steps=6, dropout=0.1, dtype="float64",
    sample=0, eval_every=0, eval_batches=1, save_every=2, microbatches=None,
)  # fmt: skip
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"fsdp": "3"}],
    2: [{"tp": 2}, {"pp": 2}, {"fsdp": "3"}],
    3: [{"tp": 3}, {"pp": 3}, {"fsdp": "2"}],
    4: [{"tp": 2}, {"pp": 2, "fsdp": "1"}, {"fsdp": "3", "tp": 2}, {"pp": 2, "schedule": "zbv"}],
}
EXACT = ("step", "loss", "lr", "grad_norm", "val_loss")


def told(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: row[name] for name in EXACT if name in row} for row in rows]


def test_losses_are_those_of_a_run_that_never_stopped(
    world: MPI.Intracomm, shared_path: Path, text: str
) -> None:
    config = replace(TINY, data=text, reproducible=True)
    meshes = MESHES[world.size]
    for number, source in enumerate(meshes):
        folder = str(shared_path / f"{number}")
        rows = train(replace(config, save=folder, **source), world)
        found = sorted(path.name for path in Path(folder).iterdir())
        assert found == ["latest", "step-00000002", "step-00000004", "step-00000006"]
        middle = f"{folder}/step-00000004"
        again = train(replace(config, resume=middle, **source), world)
        assert told(again) == told(rows[4:]), source
        other = meshes[(number + 1) % len(meshes)]
        for after, before in zip(
            train(replace(config, resume=middle, **other), world), rows[4:], strict=True
        ):
            for name in set(EXACT) & before.keys():
                assert abs(after[name] - before[name]) <= 1e-10 * abs(before[name]), (source, other)


def test_settings_that_are_not_given_are_the_checkpoints(
    world: MPI.Intracomm, shared_path: Path, text: str
) -> None:
    folder = str(shared_path / "run")
    config = replace(TINY, data=text, steps=2, lr=1e-3, seed=3, save=folder)
    train(config, world)
    command = TrainConfig(resume=folder, fsdp="2")
    found = going_on(command, lambda usual: replace(usual, resume=folder, fsdp="2"))
    own = replace(config, save=None, save_every=100, sample=160, eval_every=100, eval_batches=4)
    assert found.model_config() == own.model_config()
    derived = {"kv_heads": found.kv_heads, "hidden": found.hidden, "tied": found.tied}
    assert found == replace(own, resume=folder, fsdp="2", **derived)
    others = {"resume": folder, "seed": 4, "batch": 24, "steps": 4}
    assert going_on(command, lambda usual: replace(usual, **others)).seed == 4
    with pytest.raises(ConfigError, match=r"^dim=12: .* model with 24"):
        going_on(command, lambda usual: replace(usual, resume=folder, dim=12))
    nowhere = TrainConfig(resume=str(shared_path / "none"))
    assert going_on(nowhere, lambda usual: replace(usual, resume=nowhere.resume)) == nowhere
    assert going_on(TrainConfig(dim=12), lambda usual: usual) == TrainConfig(dim=12)


def test_what_cannot_be_gone_on_from(world: MPI.Intracomm, shared_path: Path, text: str) -> None:
    folder = str(shared_path / "run")
    config = replace(TINY, data=text, steps=2, save=folder, keep=1)
    train(config, world)
    weights = str(shared_path / "weights")
    with mp.Communicator(world) as comm:
        mp.save(weights, {"model": {}, "state": {"step": 0, "model": {}}}, comm)
    mistakes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"resume": folder}, ConfigError, "has taken 2.*more --steps"),
        ({"resume": folder, "steps": 4, "heads": 6}, ConfigError, "model with 12"),
        ({"resume": folder, "steps": 4, "dim": 12}, ConfigError, "^dim=12: .* model with 24"),
        ({"resume": weights}, ConfigError, "holds no run.*--init"),
        ({"resume": ""}, ConfigError, "resume='': it is empty"),
        ({"resume": str(shared_path / "none")}, CheckpointError, "does not exist"),
        ({"save": text}, CheckpointError, "cannot be made"),
        ({}, ConfigError, "^save=.*holds the checkpoints of a run, the newest step-00000002"),
        ({"save": None}, ConfigError, "--save"),
    ]
    world.barrier()
    if world.rank == 0:
        Path(folder, "latest").unlink()  # as where only the folders of steps were copied
    world.barrier()
    for changes, error, words in mistakes:
        with pytest.raises(error, match=words) as caught:
            train(replace(config, **changes), world)
        assert is_of_all_ranks(caught.value) or isinstance(caught.value, ConfigError)
