"""What one mesh has saved every other loads, bit for bit, and safetensors alone opens the files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file

import mpipar as mp
from mpipar import rng
from mpipar.checkpoint import together, write
from mpipar.checkpoint.entries import files_of
from mpipar.optim import AdamW
from mpipar.train.config import TrainConfig
from mpipar.train.held import Staged, hold

TINY = TrainConfig(layers=4, dim=48, heads=12, vocab=37, seq=8, batch=8, dtype="float64")
Layout = dict[str, Any]

# of each number of ranks: the fields of TrainConfig; "ranks": 1 is one rank alone
MESHES: dict[int, list[Layout]] = {
    1: [{"ranks": 1}, {"fsdp": "3"}],
    2: [{"ranks": 1}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"fsdp": "2"}],
    3: [{"ranks": 1}, {"dp": 3}, {"tp": 3}, {"pp": 3}, {"fsdp": "3"}, {"fsdp": "1"}],
    4: [
        {"ranks": 1},
        {"dp": 4},
        {"tp": 2, "dp": 2},
        {"tp": 4},
        {"pp": 2, "dp": 2, "fsdp": "1"},
        {"pp": 2, "tp": 2, "schedule": "zbv"},
        {"pp": 4},
        {"fsdp": "3", "tp": 2},
        {"fsdp": "2", "cp": 2},
    ],
}


@contextmanager
def held(world: MPI.Intracomm, config: TrainConfig, layout: Layout) -> Iterator[Any]:
    """Yield (mesh, tree) of a model with its optimiser on a mesh of all ranks, or of this one."""
    raw = MPI.COMM_SELF if layout.get("ranks") == 1 else world
    config = replace(config, **{k: v for k, v in layout.items() if k != "ranks"})
    with mp.Mesh(raw, config.pp, config.dp, config.cp, config.tp, config.ep) as mesh:
        made = hold(config, mesh)
        model = made.pipeline if isinstance(made, Staged) else made.replica
        yield mesh, {"model": model, "optimizer": AdamW(made.parameters())}
        made.destroy()


def right(entry: Any) -> np.ndarray:
    """Return values that depend on the name and the global index only."""
    if entry.name.endswith(".step"):
        return np.full(1, 1 + rng.key(0, entry.name) % 1000)
    values = rng.uniform(rng.key(0, entry.name), entry.spec.global_index())
    return values.astype(entry.array.dtype)


def fill(tree: dict[str, Any]) -> None:
    for entries in files_of(tree).values():
        for entry in entries:
            entry.array[...] = right(entry)


def assert_right(tree: dict[str, Any], what: object) -> None:
    for entries in files_of(tree).values():
        for entry in entries:
            assert np.array_equal(entry.array, right(entry)), (what, entry.name)


def save(
    folder: Path, world: MPI.Intracomm, config: TrainConfig, layout: Layout, **how: Any
) -> None:
    """Save from a mesh; one rank alone is rank 0."""
    with held(world, config, layout) as (mesh, tree):
        if layout.get("ranks") != 1 or world.rank == 0:
            fill(tree)
            saving = mp.save(folder, {**tree, "state": {"step": 7, "loss": 0.1}}, mesh, **how)
            assert saving.wait() == folder
    world.barrier()


def write_in_way(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saving take one of its three ways: ranges in shared memory, views, runs as they are."""
    monkeypatch.setattr(together, "RANGE", 3 * 4096)
    monkeypatch.setenv("MPIPAR_WINDOWS", "0" if number % 3 == 1 else "1")
    monkeypatch.setattr(write, "LONG", 1 if number % 3 == 2 else 1 << 16)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_any_mesh_loads_what_any_mesh_saved(
    world: MPI.Intracomm, shared_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meshes = MESHES[world.size][:: 2 if model == "llama" else 1]
    kv = 3 if world.size == 3 else 4
    how = {"kv_heads": kv, "hidden": 96} if model == "llama" else {}
    config = replace(TINY, model=model, tied=True, **how)
    for number, source in enumerate(meshes):
        folder = shared_path / f"{number}"
        write_in_way(number // 2, monkeypatch)
        save(folder, world, config, source, async_op=number % 2 == 1)
        for turn in (1, 4):
            target = meshes[(number + turn) % len(meshes)]
            with held(world, config, target) as (mesh, tree):
                loaded = mp.load(folder, tree, mesh)
                assert_right(tree, (source, target))
                assert loaded["state"] == {"step": 7, "loss": 0.1}
                assert loaded["model"] is tree["model"]
        same_files(folder, shared_path / "0")


def test_experts_spread_over_ranks(world: MPI.Intracomm, shared_path: Path) -> None:
    config = replace(TINY, layers=2, experts=4, shared=24, hidden=24)
    meshes: list[Layout] = [{"ranks": 1}, {"ep": world.size}, {"fsdp": "3"}]
    if world.size % 2 == 0:
        meshes.append({"tp": 2, "ep": world.size // 2})
    for number, source in enumerate(meshes):
        save(shared_path / f"{number}", world, config, source)
        with held(world, config, meshes[number - 1]) as (mesh, tree):
            mp.load(shared_path / f"{number}", tree, mesh)
            assert_right(tree, source)


def same_files(folder: Path, first: Path) -> None:
    """The bytes are the same whatever mesh wrote them, and safetensors finds the right arrays."""
    for name in ("model", "optimizer"):
        path = folder / f"{name}.safetensors"
        assert path.read_bytes() == (first / path.name).read_bytes()
        for key, array in load_file(path).items():
            spec = mp.Spec.replicated(key, array.shape)
            values = rng.uniform(rng.key(0, key), spec.global_index()).reshape(array.shape)
            assert key.endswith(".step") or np.array_equal(array, values), key
