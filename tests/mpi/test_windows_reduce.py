"""All_reduce in node-shared memory against NumPy, on one node and on pretended ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.comm import run

LAYOUTS = ["", "0,0,1,1", "0,0,0,1", "0,1,1,2"]  # nodes of the world's ranks
OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def data(rank: int, turn: int, n: int) -> np.ndarray:
    return np.random.default_rng([rank, turn, n]).standard_normal(n)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout or "real")
def comm(
    request: pytest.FixtureRequest, raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mp.Communicator]:
    """A group on the machine's own nodes, or on pretended ones."""
    if request.param:
        monkeypatch.setenv("MPIPAR_FAKE_NODES", request.param)
    with mp.Communicator(raw) as made:
        yield made


@pytest.mark.parametrize("slots", [1, 2])
def test_every_operation_and_size(comm: mp.Communicator, slots: int) -> None:
    for n in (0, 1, 2, 7, 1000, 70001):
        with comm.window(n, "float64", slots) as window:
            assert window.shared
            assert not window.result.any()
            for turn, (op, reference) in enumerate(OPS.items()):
                inputs = [data(rank, turn, n) for rank in range(comm.size)]
                window.buffer[:] = inputs[comm.rank]
                result = window.all_reduce(op)
                np.testing.assert_allclose(
                    result, reference(inputs, axis=0), rtol=1e-12, atol=1e-13
                )
                np.testing.assert_array_equal(window.result, result)
                assert not result.flags.writeable
                assert result.dtype == np.float64


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "complex128"])
def test_other_dtypes(comm: mp.Communicator, dtype: str) -> None:
    with comm.window(9, dtype) as window:
        window.buffer[:] = np.arange(9) + comm.rank
        expected = comm.size * np.arange(9) + sum(range(comm.size))
        np.testing.assert_array_equal(window.all_reduce(), expected.astype(dtype))
        if dtype in ("int64", "uint8"):
            with pytest.raises(TypeError, match="mean"):
                window.start("mean")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_sums_are_float32_inside(comm: mp.Communicator, dtype: Any) -> None:
    with comm.window(1000, dtype) as window:
        window.buffer[:] = np.full(1000, 30000, dtype)
        np.testing.assert_array_equal(window.all_reduce("mean"), np.full(1000, 30000, dtype))
        inputs = [data(rank, 0, 1000).astype(dtype) for rank in range(comm.size)]
        window.buffer[:] = inputs[comm.rank]
        total = np.sum([x.astype(np.float32) for x in inputs], axis=0)
        result = window.all_reduce()
        if comm.process_group.windows.team.nodes.count == 1:
            in_order = inputs[0].astype(np.float32)
            for x in inputs[1:]:
                in_order = in_order + x.astype(np.float32)
            np.testing.assert_array_equal(result, in_order.astype(dtype))
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(result.astype(np.float32), total, rtol=eps, atol=1e-5)


def test_added_in_rank_order(raw: MPI.Intracomm) -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    with mp.Communicator(raw) as comm, comm.window(40001, "float64") as window:
        expected = np.full(40001, values[0])
        for rank in range(1, comm.size):
            expected = expected + values[rank % 4]
        for _ in range(3):
            window.buffer[:] = values[comm.rank % 4]
            assert window.all_reduce().tobytes() == expected.tobytes()


def test_across_nodes_every_rank_and_run_has_the_same_bits(comm: mp.Communicator) -> None:
    with comm.window(5003, "float64") as window:
        seen = set()
        for _ in range(3):
            window.buffer[:] = data(comm.rank, 1, 5003)
            seen.add(window.all_reduce().tobytes())
        assert len(seen) == 1
        assert len(set(comm.process_group.raw.allgather(seen.pop()))) == 1


def test_messages_cut_and_synchronous(
    comm: mp.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "synchronous_sends", True)
    comm.process_group.segment_bytes = 1000
    with comm.window(3001, "float32") as window:
        for turn in range(3):
            inputs = [data(rank, turn, 3001).astype(np.float32) for rank in range(comm.size)]
            window.buffer[:] = inputs[comm.rank]
            np.testing.assert_allclose(
                window.all_reduce(), np.sum(inputs, axis=0), rtol=1e-5, atol=1e-5
            )


def test_the_result_lies_once_in_a_node(comm: mp.Communicator) -> None:
    """A byte that the first rank of the node writes is there for all of them."""
    with comm.window(5, "float32") as window:
        window.buffer[:] = 1
        result = window.all_reduce()
        local = comm.process_group.windows.team.local
        if local.rank == 0:
            window._vectors[0][1][2] = 77
        local.Barrier()
        assert result[2] == 77
        assert result[1] == comm.size


def test_counted_and_timed(comm: mp.Communicator) -> None:
    before = comm.calls["all_reduce"]
    with comm.window(5) as window:
        window.all_reduce()
        window.all_reduce()
    assert comm.calls["all_reduce"] == before + 2
    assert comm.seconds > 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_nothing_is_left_after_destroy(raw: MPI.Intracomm) -> None:
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split(None, 5)[5] for line in lines if "/dev/shm/" in line]

    n = 3 << 20
    with mp.Communicator(raw) as comm:
        comm.window(5).destroy()
        before = mapped()
        window = comm.window(n, "uint8")
        during = {name for name in mapped() if name not in before and "(deleted)" not in name}
        window.destroy()
        window.destroy()
        assert mapped() == before
        raw.Barrier()
        assert not [name for name in during if Path(name).exists()]
        left = comm.window(n)
    assert left not in comm.process_group.windows.alive
    with pytest.raises(RuntimeError, match="destroyed"):
        left.start()
