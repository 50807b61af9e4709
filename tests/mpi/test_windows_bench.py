"""The rows of `mpipar bench collectives` for windows."""

import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.bench import collectives, gloo, timing


def test_rows_of_windows_and_of_others(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_effort", lambda nbytes: (1, 2))
    calls = []
    with mp.Communicator(world) as comm:
        others = {gloo.NAME: lambda: calls.append(1)}
        rows = collectives.measure(comm, "all_reduce", 4096, ("window", "ring"), 1, others)
        alone = collectives.measure(comm, "all_gather", 4096, ("window", "ring"), 1)
    assert calls
    found = {row.algorithm: row for row in rows}
    assert {name: row.buffers for name, row in found.items()} == {
        "ring": "private",
        "window": "window",
        gloo.NAME: "private",
    }
    assert all(row.ratio > 0 and row.bytes == 4096 for row in rows)
    assert [row.algorithm for row in alone] == ["ring"]
    table = collectives.tune(rows)
    assert table.find("all_reduce", comm.size, 4096) == "ring"  # not what needs other memory
