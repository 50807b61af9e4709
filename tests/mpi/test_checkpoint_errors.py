"""A mistake or a damaged file is one error on every rank, and what was saved before stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.checkpoint import place, write
from mpipar.errors import CheckpointError, ConfigError, MismatchError
from mpipar.nn import Linear
from mpipar.optim import SGD, AdamW


@pytest.fixture
def mesh(world: MPI.Intracomm) -> Iterator[mp.Mesh]:
    with mp.Mesh(world) as made:
        yield made


def tree(mesh: mp.Mesh, width: int = 7, **more: Any) -> dict[str, Any]:
    layer = Linear(5, width, seed=3, name="layer")
    return {"model": layer, "optimizer": AdamW(layer.parameters()), **more}


def damage(world: MPI.Intracomm, path: Path, at: int | None) -> None:
    """Change a byte; at=None: cut the last one off."""
    world.barrier()
    if world.rank == 0:
        data = bytearray(path.read_bytes())
        if at is None:
            path.write_bytes(data[:-1])
        else:
            data[at] ^= 4
            path.write_bytes(data)
    world.barrier()


def test_damaged_files_are_found(mesh: mp.Mesh, world: MPI.Intracomm, shared_path: Path) -> None:
    folder = shared_path / "one"
    for name, at, text in [
        ("model.safetensors", -1, "model.safetensors is damaged in bytes"),
        ("optimizer.safetensors", -9, "optimizer.safetensors is damaged in bytes"),
        ("model.safetensors", 20, "damaged at its beginning"),
        ("state.json", 0, "state.json is damaged"),
        ("manifest.json", 40, r"manifest\.json is damaged"),
        ("manifest.json", None, r"manifest\.json is damaged"),
        ("model.safetensors", None, r"model\.safetensors lacks 1 of its \d+ bytes"),
    ]:
        mp.save(folder, tree(mesh, state={"step": 1}), mesh)
        damage(world, folder / name, at)
        with pytest.raises(CheckpointError, match=text):
            mp.load(folder, tree(mesh), mesh)
        damage(world, folder / name, at) if at is not None else None
    with pytest.raises(CheckpointError, match="does not exist"):
        mp.load(shared_path / "none", tree(mesh), mesh)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*manifest\.json: No such"):
        mp.load(shared_path, tree(mesh), mesh)
    mp.save(folder, tree(mesh), mesh)
    with pytest.raises(CheckpointError, match=r"manifest\.json is a file"):
        mp.load(folder / "manifest.json", tree(mesh), mesh)
    world.barrier()
    if world.rank == 0:
        (folder / "optimizer.safetensors").unlink()
        folder.rename(shared_path / "step-00000004")
    world.barrier()
    for given in (shared_path, shared_path / "step-00000004"):
        with pytest.raises(CheckpointError, match=r"step-00000004/optimizer\.safetensors: No such"):
            mp.load(given, tree(mesh), mesh)


def test_what_does_not_fit_is_named(mesh: mp.Mesh, world: MPI.Intracomm, shared_path: Path) -> None:
    folder = shared_path / "one"
    saved = tree(mesh)
    mp.save(folder, saved, mesh)
    other = tree(mesh, width=8)
    before = other["model"].weight.data.copy()
    with pytest.raises(ConfigError, match=r"weight is \('float32', \(7, 5\)\) in the file"):
        mp.load(folder, other, mesh)
    assert np.array_equal(other["model"].weight.data, before)
    momentum = SGD(saved["model"].parameters(), momentum=0.9)
    with pytest.raises(ConfigError, match=r"weight\.momentum is missing"):
        mp.load(folder, {"model": saved["model"], "optimizer": momentum}, mesh)
    with pytest.raises(ConfigError, match="bias is in the file only"):
        mp.load(folder, {"model": {"weight": np.zeros((7, 5), np.float32)}}, mesh)
    with pytest.raises(CheckpointError, match=r"has no ema\.safetensors"):
        mp.load(folder, {"ema": saved["model"]}, mesh)
    with pytest.raises(ConfigError, match="what JSON can say"):
        mp.save(folder, {"state": {"x": np.zeros(2)}, **saved}, mesh)
    with pytest.raises(ConfigError, match="complex128"):
        mp.save(folder, {"model": {"z": np.zeros(2, complex)}}, mesh)
    spec = mp.Spec.replicated("w", (8, 2)).shard("tp", 0, 0, 2)
    half = mp.nn.Parameter(np.zeros((4, 2)), spec)
    with pytest.raises(ConfigError, match="elements once"):
        mp.save(folder, {"model": {"w": half}}, mesh)
    for wrong in ({}, {"a/b": saved["model"]}, {"model": 3}, {"model": {"x": 3.0}}):
        with pytest.raises(ConfigError):
            mp.save(folder, wrong, mesh)
    if world.size > 1:
        last = world.rank == world.size - 1
        named = rf"rank {world.size - 1}: "
        with pytest.raises(MismatchError, match=f"step=0; {named}step=1$"):
            mp.save(folder, saved, mesh, step=int(last))
        with pytest.raises(MismatchError, match=rf"directory='.*'; {named}directory='.*other'"):
            mp.save(shared_path / "other" if last else folder, saved, mesh)
        keys = rf"keys of tree=\['model'\]; {named}keys of tree=\['model', 'optimizer'\]"
        with pytest.raises(MismatchError, match=keys):
            mp.save(folder, saved if last else {"model": saved["model"]}, mesh)
        with pytest.raises(MismatchError, match=rf"keys of like=.*{named}keys of like=\[\]"):
            mp.load(folder, {} if last else saved, mesh)
        with pytest.raises(MismatchError, match="elsewhere"):
            mp.save(folder, {"model": {"x": np.zeros(1 + (world.rank == 0))}}, mesh)
    mp.load(folder, saved, mesh)


def test_what_arrays_are_saved_and_filled(
    mesh: mp.Mesh, world: MPI.Intracomm, shared_path: Path
) -> None:
    folder, last = shared_path / "one", world.rank == world.size - 1
    saved = tree(mesh, state={"step": 7})
    text = np.array(["a"]) if last else np.zeros(1)
    with pytest.raises(ConfigError, match=r'dtype of x=.*texts go under "state"'):
        mp.save(folder, {"more": {"x": text}}, mesh)
    mp.save(folder, saved, mesh)
    assert mp.load(folder, {}, mesh) == {"state": {"step": 7}}
    fixed = {name: array.copy() for name, array in saved["model"].state_dict().items()}
    fixed["bias"].flags.writeable = not last
    with pytest.raises(ConfigError, match=r"like\['model'\].*bias is filled in place.*read-only"):
        mp.load(folder, {"model": fixed}, mesh)
    with pytest.raises(ConfigError, match=r"^like='list'"):
        mp.load(folder, [saved["model"]], mesh)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^key of like='a/b'"):
        mp.load(folder, {"a/b": saved["model"]}, mesh)
    with pytest.raises(ConfigError, match=r"step=1\.5"):
        mp.load(folder, saved, mesh, step=1.5)  # type: ignore[arg-type]
    other = AdamW(saved["model"].parameters(), lr=0.5)
    mp.load(folder, {"model": saved["model"], "optimizer": other}, mesh)
    assert other.lr == 0.5  # settings are not restored, as the docstring says


def test_a_failed_save_leaves_the_one_before(
    mesh: mp.Mesh, world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = shared_path / "runs"
    saved = tree(mesh)
    mp.save(runs, saved, mesh, step=1)
    monkeypatch.setattr(place, "check_space", _too_full)
    with pytest.raises(CheckpointError, match="too full"):
        mp.save(runs, saved, mesh, step=2)
    monkeypatch.undo()

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if world.rank == world.size - 1:
        monkeypatch.setattr(write, "_write_at", broken)
    with pytest.raises(CheckpointError, match="No space left"):
        mp.save(runs, saved, mesh, step=3, async_op=True).wait()
    monkeypatch.undo()
    world.barrier()
    assert sorted(p.name for p in runs.iterdir()) == ["latest", "step-00000001"]
    with pytest.raises(CheckpointError, match="is a file"):
        mp.save(runs / "latest", saved, mesh)
    with pytest.raises(CheckpointError, match="holds something else"):
        mp.save(runs, saved, mesh)
    with pytest.raises(CheckpointError, match="cannot be made"):
        mp.save(runs / "latest" / "below", saved, mesh)


def _too_full(folder: Path, nbytes: int) -> None:
    raise CheckpointError("the disk is too full")


def test_steps_latest_and_keep(mesh: mp.Mesh, world: MPI.Intracomm, shared_path: Path) -> None:
    runs = shared_path / "runs"
    saved = tree(mesh)
    weight = saved["model"].weight.data
    mp.save(runs / "step-00000007-best", saved, mesh)  # as a user names a copy
    for step in (10, 5, 20, 30):
        weight[...] = step
        saving = mp.save(
            runs, {**saved, "state": {"step": step}}, mesh, step=step, keep=2, async_op=True
        )
        weight[...] = -1  # a copy is written
    saving.wait()
    assert saving.test()
    world.barrier()
    names = sorted(p.name for p in runs.iterdir())
    assert names == ["latest", "step-00000007-best", "step-00000020", "step-00000030"]
    assert (runs / "latest").read_text() == "step-00000030\n"
    assert mp.load(runs, saved, mesh)["state"] == {"step": 30}
    assert (weight == 30).all()
    assert mp.load(runs, saved, mesh, step=20)["state"] == {"step": 20}
    assert (weight == 20).all()
    assert place.passed_over(runs) == []
    damage(world, runs / "step-00000030" / "manifest.json", 30)
    assert mp.load(runs, saved, mesh)["state"] == {"step": 20}
    (said,) = place.passed_over(runs)
    assert "step-00000030" in said
    world.barrier()
    if world.rank == 0:  # as a job leaves it that was killed while it replaced a folder
        (runs / "step-00000020").rename(runs / ".one.old-1")
        (runs / ".step-00000040.tmp-ab").mkdir()
    world.barrier()
    assert mp.load(runs / "one", saved, mesh)["state"] == {"step": 20}
    mp.save(runs, saved, mesh, step=50)
    world.barrier()
    assert not list(runs.glob(".step*"))


def test_sixteen_bits_and_other_types(mesh: mp.Mesh, shared_path: Path) -> None:
    layer = Linear(5, 7, seed=3, name="layer", dtype="bfloat16")
    arrays = {
        "flags": np.array([True, False, True]),
        "bytes": np.arange(5, dtype=np.uint8),
        "number": np.array(2.5, np.float16),
        "turned": np.arange(12.0).reshape(3, 4).T,
        "none": np.zeros((0, 3)),
    }
    optimizer = AdamW(layer.parameters())
    optimizer.state["layer.weight"]["master"][...] = 0.1
    saved = {"model": layer, "optimizer": optimizer, "more": arrays}
    mp.save(shared_path / "one", saved, mesh)
    expected = {name: array.copy() for name, array in arrays.items()}
    values = layer.weight.data.copy()
    for array in (layer.weight.data, optimizer.state["layer.weight"]["master"], *arrays.values()):
        array[...] = 0
    mp.load(shared_path / "one", saved, mesh)
    assert values.dtype == ml_dtypes.bfloat16
    assert np.array_equal(layer.weight.data, values)
    assert (optimizer.state["layer.weight"]["master"] == np.float32(0.1)).all()
    for name, array in arrays.items():
        assert np.array_equal(array, expected[name]), name
    manifest = json.loads((shared_path / "one" / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [f"{n}.safetensors" for n in ("model", "more", "optimizer")]
