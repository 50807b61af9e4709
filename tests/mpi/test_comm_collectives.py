"""Every collective by every algorithm against NumPy in float64, on any number of ranks."""

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.comm import buffers, group
from mpipar.partition import blocks, offsets

SIZES = (0, 1, 2, 7, 8, 9, 1000)
OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def data(rank: int, *shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype(dtype)


def everyone(comm: mp.Communicator, *shape: int, dtype: Any = np.float64) -> list[np.ndarray]:
    return [data(rank, *shape, dtype=dtype) for rank in range(comm.size)]


@pytest.mark.parametrize("algorithm", ["auto", *group.algorithms("all_reduce")])
def test_all_reduce(comm: mp.Communicator, algorithm: str) -> None:
    for n in SIZES:
        inputs = everyone(comm, n)
        for op, reference in OPS.items():
            result = comm.all_reduce(inputs[comm.rank], op=op, algorithm=algorithm)
            np.testing.assert_allclose(result, reference(inputs, axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(inputs[comm.rank], data(comm.rank, n))


@pytest.mark.parametrize("algorithm", ["auto", *group.algorithms("reduce_scatter")])
def test_reduce_scatter(comm: mp.Communicator, algorithm: str) -> None:
    for n in SIZES:
        inputs = everyone(comm, 3, n)
        for dim in (0, 1):
            result = comm.reduce_scatter(inputs[comm.rank], dim=dim, algorithm=algorithm)
            parts = np.array_split(np.sum(inputs, axis=0), comm.size, axis=dim)
            np.testing.assert_allclose(result, parts[comm.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["auto", *group.algorithms("all_gather")])
def test_all_gather(comm: mp.Communicator, algorithm: str) -> None:
    for n in SIZES:
        for dim in (0, 1):
            inputs = everyone(comm, 3, n)
            result = comm.all_gather(inputs[comm.rank], dim=dim, algorithm=algorithm)
            np.testing.assert_array_equal(result, np.concatenate(inputs, axis=dim))


@pytest.mark.parametrize("algorithm", ["auto", *group.algorithms("all_to_all")])
def test_all_to_all_with_uneven_sizes_both_ways(comm: mp.Communicator, algorithm: str) -> None:
    p, r = comm.size, comm.rank
    for n in (0, 1, 7, 9):
        inputs = [data(i, 2, i + 1, n, 3) for i in range(p)]  # sizes along dim 1 differ
        there = comm.all_to_all(inputs[r], 2, 1, sizes="exchange", algorithm=algorithm)
        whole = np.concatenate(inputs, axis=1)
        np.testing.assert_array_equal(there, np.array_split(whole, p, axis=2)[r])


def test_all_to_all_4d_there_and_back(comm: mp.Communicator) -> None:
    heads, seq = 7, 4 * comm.size
    x = data(comm.rank, 2, seq // comm.size, heads, 3)
    there = comm.all_to_all_4d(x)
    assert there.shape == (2, seq, blocks(heads, comm.size)[comm.rank], 3)
    back = comm.all_to_all_4d(there, 1, 2, sizes=blocks(heads, comm.size))
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_rooted_collectives(comm: mp.Communicator, name: str) -> None:
    p, r = comm.size, comm.rank
    for algorithm in ("auto", *group.algorithms(name)):
        for root in {0, p - 1, p // 2}:
            for n in SIZES:
                inputs = everyone(comm, 2, n)
                if name == "broadcast":
                    x = inputs[r] if r == root else None
                    result = comm.broadcast(x, src=root, algorithm=algorithm)
                    np.testing.assert_array_equal(result, inputs[root])
                elif name == "reduce":
                    result = comm.reduce(inputs[r], dst=root, algorithm=algorithm)
                    if r == root:
                        np.testing.assert_allclose(result, np.sum(inputs, axis=0), rtol=1e-12)
                    else:
                        assert result is None
                elif name == "gather":
                    uneven = [x[:, : i + 1] for i, x in enumerate(inputs)]
                    result = comm.gather(uneven[r], dst=root, dim=1, algorithm=algorithm)
                    if r == root:
                        np.testing.assert_array_equal(result, np.concatenate(uneven, axis=1))
                    else:
                        assert result is None
                else:
                    x = inputs[root] if r == root else None
                    result = comm.scatter(x, src=root, dim=1, algorithm=algorithm)
                    np.testing.assert_array_equal(
                        result, np.array_split(inputs[root], p, axis=1)[r]
                    )


def test_shift_goes_round_the_ring(comm: mp.Communicator) -> None:
    for offset in (-2, -1, 0, 1, 2, 5):
        x = data(comm.rank, 3, 2)
        result = comm.shift(x, offset)
        np.testing.assert_array_equal(result, data((comm.rank - offset) % comm.size, 3, 2))


@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "bool", "complex128", "uint16"])
def test_other_dtypes(comm: mp.Communicator, dtype: str) -> None:
    inputs = [np.arange(5).astype(dtype) for _ in range(comm.size)]
    result = comm.all_reduce(inputs[comm.rank])
    expected = np.sum(inputs, axis=0, dtype=dtype)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(comm.all_gather(inputs[comm.rank]), np.concatenate(inputs))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_sums_are_float32_inside(comm: mp.Communicator, dtype: Any) -> None:
    big = np.full(5, 30000, dtype)
    for collective in (comm.all_reduce, comm.reduce):
        result = collective(big, op="mean")
        if result is not None:
            np.testing.assert_array_equal(result, big)
    inputs = everyone(comm, 1000, dtype=dtype)
    total = np.zeros(1000, np.float32)
    for x in inputs:
        total += x.astype(np.float32)
    np.testing.assert_array_equal(comm.all_reduce(inputs[comm.rank]), total.astype(dtype))
    for algorithm in ("mpi", "ring"):
        with pytest.raises((ValueError, TypeError), match="algorithm"):
            comm.all_reduce(big, algorithm=algorithm)


def test_reproducible_adds_in_rank_order(raw: MPI.Intracomm) -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    with mp.Communicator(raw, reproducible=True) as comm:
        for n in (1, 3, 40000):
            x = np.full(n, values[comm.rank % 4])
            expected = np.full(n, values[0])
            for rank in range(1, comm.size):
                expected = expected + values[rank % 4]
            result = comm.all_reduce(x)
            assert result.tobytes() == expected.tobytes()
            mine = comm.reduce_scatter(x)
            assert mine.tobytes() == np.array_split(expected, comm.size)[comm.rank].tobytes()
        with pytest.raises(ValueError, match="reproducible"):
            comm.all_reduce(x, algorithm="ring")
        with pytest.raises(ValueError, match="reproducible"):
            comm.all_reduce(x, algorithm="mpi")


def test_user_op_keeps_rank_order(comm: mp.Communicator) -> None:
    """x op y = x + y/2 + 1 is neither commutative nor associative: a left fold, in rank order."""

    def combine(left: Any, right: Any, datatype: MPI.Datatype) -> None:
        a, b = np.frombuffer(left, np.float64), np.frombuffer(right, np.float64)
        b[:] = a + b / 2 + 1

    op = MPI.Op.Create(combine, commute=False)
    inputs = everyone(comm, 50)
    expected = inputs[0]
    for x in inputs[1:]:
        expected = expected + x / 2 + 1
    np.testing.assert_allclose(comm.all_reduce(inputs[comm.rank], op=op), expected, rtol=1e-12)
    np.testing.assert_allclose(
        comm.all_reduce(inputs[comm.rank], op=MPI.SUM), np.sum(inputs, axis=0), rtol=1e-12
    )
    op.Free()


def test_out_is_filled_in_place(comm: mp.Communicator) -> None:
    inputs = everyone(comm, 4, 6)
    x = inputs[comm.rank].copy()
    for n_algorithm in group.algorithms("all_reduce"):
        out = np.empty_like(x)
        assert comm.all_reduce(x, out=out, algorithm=n_algorithm) is out
        np.testing.assert_allclose(out, np.sum(inputs, axis=0), rtol=1e-12, atol=1e-13)
        same = x.copy()
        assert comm.all_reduce(same, out=same, algorithm=n_algorithm) is same
        np.testing.assert_allclose(same, np.sum(inputs, axis=0), rtol=1e-12, atol=1e-13)
    out = np.empty((4, 6 * comm.size))
    assert comm.all_gather(x, out=out) is out
    np.testing.assert_array_equal(out, np.concatenate(inputs, axis=1))


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "shift"])
def test_a_wrong_out_is_an_error_and_nothing_is_written(
    comm: mp.Communicator, collective: str
) -> None:
    x = np.ones((4, 4))
    call = getattr(comm, collective)
    backing = np.zeros((100, 100))
    for out in (backing[:3, :3], backing[::2, ::2][:4, :4].T, np.zeros((4, 4), np.float32)):
        with pytest.raises((ValueError, TypeError), match="out"):
            call(x, out=out)
    assert not backing.any()


def test_two_handles_waited_for_in_opposite_order(comm: mp.Communicator) -> None:
    inputs = everyone(comm, 20000)
    handles = [
        comm.all_reduce(inputs[comm.rank], algorithm="ring", async_op=True),
        comm.all_gather(inputs[comm.rank], algorithm="ring", async_op=True),
        comm.all_reduce(2 * inputs[comm.rank], algorithm="ring", async_op=True),
    ]
    order = [0, 1, 2] if comm.rank % 2 else [2, 1, 0]
    for i in order:
        handles[i].wait()
    total = np.sum(inputs, axis=0)
    np.testing.assert_allclose(handles[0].wait(), total, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(handles[1].wait(), np.concatenate(inputs))
    np.testing.assert_allclose(
        handles[2].wait(), 2 * np.sum(inputs, axis=0), rtol=1e-11, atol=1e-12
    )


def test_test_advances_to_the_end(comm: mp.Communicator) -> None:
    handle = comm.all_reduce(np.ones(100000), algorithm="ring", async_op=True)
    while not handle.test():
        pass
    assert (handle.wait() == comm.size).all()


def test_blocking_calls_between_handles(comm: mp.Communicator) -> None:
    """Small blocking calls (on persistent requests) while larger ones are in flight."""
    handles = []
    for i in range(5):
        handles.append(comm.all_reduce(np.full(5000, float(i)), algorithm="ring", async_op=True))
        assert comm.all_reduce(np.array([1.0]))[0] == comm.size
        comm.barrier()
    for i, handle in enumerate(handles):
        assert (handle.wait() == i * comm.size).all()


@pytest.mark.parametrize("limit", [16, 1000])
def test_messages_beyond_the_count_limit_are_cut(
    comm: mp.Communicator, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(buffers, "LIMIT", limit)
    n = 9000 if limit == 1000 else 700
    inputs = [x.astype(np.float32) for x in everyone(comm, n)]
    handle = comm.all_reduce(inputs[comm.rank], algorithm="ring", async_op=True)
    np.testing.assert_allclose(handle.wait(), np.sum(inputs, axis=0), rtol=1e-4, atol=1e-5)
    gathered = comm.all_gather(inputs[comm.rank], algorithm="ring", async_op=True).wait()
    np.testing.assert_array_equal(gathered, np.concatenate(inputs))


def test_segments_give_the_same_numbers(raw: MPI.Intracomm) -> None:
    results = []
    for segment_bytes in (64, 1000, None):
        with mp.Communicator(raw, segment_bytes=segment_bytes) as comm:
            x = data(comm.rank, 10007)
            results.append(comm.all_reduce(x, algorithm="ring"))
            if comm.size > 1:
                results.append(comm.all_reduce(x, algorithm="halving_doubling"))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-12, atol=1e-13)


def test_send_recv_and_sendrecv(comm: mp.Communicator) -> None:
    p, r = comm.size, comm.rank
    x = data(r, 3, 2)
    handle = comm.send(x, async_op=True)
    np.testing.assert_array_equal(comm.recv((3, 2), "float64"), data((r - 1) % p, 3, 2))
    handle.wait()
    np.testing.assert_array_equal(comm.sendrecv(x), data((r - 1) % p, 3, 2))
    back = comm.sendrecv(x, dst=(r - 1) % p, src=(r + 1) % p)
    np.testing.assert_array_equal(back, data((r + 1) % p, 3, 2))
    handle = comm.send(np.ones(3), async_op=True)
    with pytest.raises(ValueError, match="24 bytes"):
        comm.recv((4,), "float64")
    handle.wait()


def test_layout_of_the_group(raw: MPI.Intracomm) -> None:
    with mp.Communicator(raw, name="some") as comm:
        assert (comm.rank, comm.size, comm.world_size) == (raw.rank, raw.size, raw.size)
        assert comm.ranks[comm.rank] == comm.global_rank == MPI.COMM_WORLD.rank
        assert comm.global_world_size == MPI.COMM_WORLD.size
        assert comm.name == "some"
        assert comm.calls["all_reduce"] == 0
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(3))
        assert comm.calls["all_reduce"] == 2
        assert comm.seconds > 0
    comm.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.all_gather(np.ones(3))
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.all_reduce(np.ones(3))


def test_three_thousand_communicators(raw: MPI.Intracomm) -> None:
    """MPICH has 2,047 for a process; the ids are counted there, so one rank is a full test."""
    for i in range(3000 if raw.size == 1 else 100):
        with mp.Communicator(raw) as comm:
            if i % 50 == 0:
                assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_communicators_that_are_dropped_do_not_hang(raw: MPI.Intracomm) -> None:
    """Nothing is freed when Python collects, in whatever order the ranks do that."""
    dropped = [mp.Communicator(raw) for _ in range(10)]
    if raw.rank % 2:
        dropped.reverse()
    while dropped:
        dropped.pop()
        gc.collect()
    with mp.Communicator(raw) as comm:
        assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_many_sizes_do_not_pile_up(comm: mp.Communicator) -> None:
    for n in range(1, group.KEEP_PREPARED + 50):
        assert comm.all_reduce(np.ones(n))[n - 1] == comm.size
    assert comm.all_reduce(np.ones(1))[0] == comm.size
    assert len(comm.process_group._prepared) <= group.KEEP_PREPARED
    assert len(comm.process_group.small) <= 2 * group.KEEP_PREPARED


def test_bad_arguments(comm: mp.Communicator) -> None:
    x = np.ones(3)
    for call in (
        lambda: comm.all_reduce(x, op="median"),
        lambda: comm.all_reduce(x, algorithm="quantum"),
        lambda: comm.all_reduce(np.array(["a"])),
        lambda: comm.all_reduce(np.array([object()])),
        lambda: comm.all_reduce(np.ones(3, int), op="mean"),
        lambda: comm.all_gather(x, dim=1),
        lambda: comm.all_gather(x, sizes=(5,) * comm.size),
        lambda: comm.all_gather(x, sizes="guess"),
        lambda: comm.reduce_scatter(x, sizes=(1,) * (comm.size + 1)),
        lambda: comm.all_to_all(np.ones((2, 2)), 0, 0),
        lambda: comm.all_to_all_4d(np.ones((2, 2))),
        lambda: comm.broadcast(x, src=comm.size),
        lambda: comm.reduce(x, dst=-1),
        lambda: comm.send(x, dst=comm.size),
        lambda: comm.recv((3,), "float64", src=99),
        lambda: mp.Communicator(None),
        lambda: mp.Communicator(MPI.COMM_SELF, algorithm="quantum"),
        lambda: mp.Communicator(MPI.COMM_SELF, timeout=0),
        lambda: mp.Communicator(MPI.COMM_SELF, device="tpu"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert isinstance(caught.value, mp.MpiparError)
    assert comm.all_reduce(x)[0] == comm.size  # the group still works


def test_offsets_of_blocks() -> None:
    assert offsets(blocks(8, 3)) == (0, 3, 6)
