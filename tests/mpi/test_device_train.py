"""Training on device arrays, on a stand-in for CuPy whose kernels are the CPU's: the same numbers.

Nothing in a step may bring an array to the host by the way, or use memory too early.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from tests import fake_cupy

TINY = TrainConfig(layers=2, dim=32, heads=4, seq=16, batch=4, steps=2, seed=1, sample=0)
MESHES: list[dict[str, Any]] = [
    {"dropout": 0.1},
    {"model": "llama", "kv_heads": 2, "tp": 2},
    {"cp": 2},
    {"cp": 2, "cp_layout": "ulysses", "accumulate": 2},
    {"tp": 2, "sequence_parallel": True},
    {"recompute": True, "reproducible": True},
    {"fsdp": "3"},
    {"fsdp": "1", "sample": 4},
    {"pp": 2, "schedule": "zb1p", "microbatches": 2},
    {"experts": 5, "ep": -1, "capacity_factor": 0.7, "shared": 8, "recompute": True},
    {"experts": 4, "tp": 2, "sequence_parallel": True, "model": "llama"},
]


@pytest.mark.parametrize("number", range(len(MESHES)), ids=lambda number: str(MESHES[number]))
def test_losses_are_those_of_the_cpu(
    world: MPI.Intracomm, text: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = MESHES[number]
    degree = mesh.get("tp", 1) * mesh.get("cp", 1) * mesh.get("pp", 1)
    dp = world.size // degree
    if world.size % degree:
        pytest.skip(f"{world.size} ranks are no multiple of {degree}")
    mesh = mesh | ({"ep": world.size} if "ep" in mesh else {})
    config = replace(TINY, data=text, batch=12 if dp == 3 else 4, **mesh)
    if config.batch // dp % config.accumulate:
        pytest.skip("accumulation cuts the batch of a rank")
    expected = train(config, world)
    aware = number % 2 == 1  # either way has its half of the meshes
    fake_cupy.install(monkeypatch, aware)
    if aware:  # no call is so small that it travels from host buffers
        monkeypatch.setattr("mpipar.comm.group.PERSISTENT_BYTES", -1)
    rows = train(replace(config, device="cuda"), world)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, right in zip(rows, expected, strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            if name in right:
                assert row[name] == pytest.approx(right[name], rel=1e-4), (name, row["step"])


def test_what_one_device_saves_the_other_resumes(
    world: MPI.Intracomm, text: str, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, data=text, batch=12, steps=3, save=str(shared_path), save_every=2)
    expected = train(replace(config, save=None), world)
    fake_cupy.install(monkeypatch)
    there = replace(config, device="cuda")
    train(there, world)
    for where in (there, config):
        rows = train(replace(where, resume=str(shared_path / "step-00000002"), save=None), world)
        assert rows[0]["step"] == 3
        assert rows[0]["loss"] == pytest.approx(expected[2]["loss"], rel=1e-4)
