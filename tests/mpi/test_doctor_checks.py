"""The checks of doctor on all ranks at once, on one node and on pretended ones."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.doctor import clocks, examine, gpu, links, machine, speed, storage
from mpipar.doctor.finding import Facts

QUICK = tuple(check for check in examine.CHECKS if check.name not in ("kernels", "threads"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LARGE", 1 << 16)
    monkeypatch.setattr(speed, "SECONDS", 0.01)
    monkeypatch.setattr(storage, "PART", 1 << 12)


@pytest.mark.parametrize("nodes", ["", "0,1,2,3", "0,0,1,1"])
def test_all_checks(
    nodes: str, world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIPAR_FAKE_NODES", nodes)
    findings = examine.examine(world, shared_path, QUICK)
    if world.rank != 0:
        assert findings == []
        return
    assert [finding.name for finding in findings] == [check.name for check in QUICK]
    found = {finding.name: finding for finding in findings}
    assert found["MPI"].verdict == found["checkpoints"].verdict == "ok"
    p = world.size
    count = len(set(nodes.split(",")[:p])) if nodes else 1
    between = found["links"].facts["between"]
    assert [pair["nodes"] for pair in between] == [
        [a, b] for a in range(count) for b in range(a + 1, count)
    ]
    assert all(pair["latency_s"] > 0 and pair["bytes_per_s"] > 0 for pair in between)
    assert len(found["speed"].facts["gflops"]) == p
    assert len(found["clocks"].facts) == count
    assert list(shared_path.iterdir()) == []


def test_a_clock_that_is_ahead_is_measured(
    world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIPAR_FAKE_NODES", "0,1,2,3")
    if world.rank == 1:
        now = clocks.time.time
        monkeypatch.setattr(clocks.time, "time", lambda: now() + 7.0)
    made = machine.explore(world, shared_path)
    offsets = clocks.probe(made)["offsets"]
    made.free()
    if world.rank == 0:
        for node, (offset, uncertain) in enumerate(offsets):
            assert abs(offset - 7.0 * (node == 1)) <= uncertain + 1e-3


def test_one_rank_without_the_folder_stops_no_other(
    world: MPI.Intracomm, shared_path: Path, tmp_path: Path
) -> None:
    """The last rank is given another folder, as if the file system were not shared."""
    last = world.rank == world.size - 1
    folder = tmp_path / "none" if last else shared_path
    made = machine.explore(world, folder)
    told: list[Facts] | None = world.gather(storage.probe(made))
    job = made.job
    made.free()
    if told is not None:
        finding = storage.judge(told, job)
        assert finding.verdict == "problem"
        assert f"rank {world.size - 1}" in finding.words


def fake_cupy(device: int) -> ModuleType:
    """What the probe uses of CuPy, over host memory, with four devices."""
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDeviceCount=lambda: 4,
        getDevice=lambda: device,
        getDeviceProperties=lambda _: {"name": b"H100"},
        deviceGetPCIBusId=lambda number: f"0000:0{number}:00.0",
    )
    cupy = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    cupy.arange, cupy.empty_like = np.arange, np.empty_like  # type: ignore[attr-defined]
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime, get_current_stream=lambda: stream
    )
    return cupy


@pytest.mark.parametrize("aware", [True, False])
def test_gpus_that_are_pretended(
    aware: bool, world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(world.rank))
    monkeypatch.setattr(gpu, "cuda_support", lambda: aware)
    (finding, *_) = examine.examine(world, shared_path, [gpu.CHECK]) or [None]
    if finding is None:
        return
    assert finding.verdict == "ok"
    assert ("is not CUDA-aware" in finding.words) == (not aware)
    assert "H100 at 0000:00:00.0" in finding.words
    tried = [one["rank"] for one in finding.facts if one["probe"] == "works"]
    assert tried == ([0, 1] if aware and world.size > 1 else [])
