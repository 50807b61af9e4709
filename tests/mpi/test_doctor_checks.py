"""The checks of doctor on all ranks at once, on one node and on pretended ones."""

from pathlib import Path

import pytest
from mpi4py import MPI

from mpipar.doctor import clocks, examine, links, machine, speed, storage
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
