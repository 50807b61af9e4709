"""Odd arrays, dropped handles, overlapping buffers, threads, and groups that cannot go on."""

import copy
import gc
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.comm import waiting


def test_a_dropped_send_handle_keeps_its_memory(comm: mp.Communicator) -> None:
    n = 5000
    x = np.arange(2.0 * n)
    comm.send(x[::2], async_op=True)  # what travels is a contiguous copy, which nobody holds
    for _ in range(70):
        comm.send(np.ones(3), async_op=True)
    gc.collect()
    junk = [np.full(n, -1.0) for _ in range(8)]
    np.testing.assert_array_equal(comm.recv((n,), "float64"), x[::2])
    for _ in range(70):
        comm.recv((3,), "float64")
    assert all((array == -1.0).all() for array in junk)


def test_a_dropped_receive_handle_keeps_its_memory(comm: mp.Communicator) -> None:
    n = 5000
    comm.recv((n,), "float64", async_op=True)
    gc.collect()
    junk = [np.full(n, -1.0) for _ in range(8)]
    comm.send(np.ones(n), async_op=True).wait()
    comm.barrier()
    waiting.progress()
    assert all((array == -1.0).all() for array in junk)


def test_destroy_waits_for_what_is_in_flight(raw: MPI.Intracomm) -> None:
    first, second = mp.Communicator(raw), mp.Communicator(raw)
    handle = first.all_reduce(np.ones(300_000), algorithm="ring", async_op=True)
    first.destroy()
    second.barrier()
    assert handle.wait()[0] == raw.size
    second.destroy()


def test_after_destroy_every_call_says_so(raw: MPI.Intracomm) -> None:
    for check in (False, True):
        comm = mp.Communicator(raw, check=check)
        comm.all_reduce(np.ones(3))
        comm.destroy()
        for call in (
            lambda c: c.all_reduce(np.ones(3)),
            lambda c: c.all_gather(np.ones(3)),
            lambda c: c.broadcast(np.ones(3)),
            lambda c: c.send(np.ones(3)),
            lambda c: c.recv((3,), "float64"),
            lambda c: c.sendrecv(np.ones(3)),
            lambda c: c.barrier(),
        ):
            with pytest.raises(RuntimeError, match="destroyed"):
                call(comm)


def test_after_an_error_in_flight_the_group_says_so(comm: mp.Communicator) -> None:
    comm.all_reduce(np.ones(3))
    comm.process_group.fails(RuntimeError("first trouble"))
    with pytest.raises(RuntimeError, match="first trouble"):
        comm.all_reduce(np.ones(3))
    with pytest.raises(RuntimeError, match="first trouble"):
        comm.recv((3,), "float64")


@pytest.mark.parametrize("n", [10, 50_000])
def test_overlapping_out_is_refused(comm: mp.Communicator, n: int) -> None:
    p = comm.size
    buffer = np.zeros(p * n + 1)
    x = buffer[:n]
    for call in (
        lambda: comm.all_reduce(x, out=buffer[1 : n + 1]),
        lambda: comm.broadcast(x, out=buffer[1 : n + 1]),
        lambda: comm.all_gather(buffer[1 : n + 1], out=buffer[: p * n]),
        lambda: comm.reduce_scatter(buffer[: p * n], out=buffer[1 : n + 1]),
    ):
        with pytest.raises(ValueError, match="overlap"):
            call()
    if p > 1:
        with pytest.raises(ValueError, match="overlap"):
            comm.shift(x, out=x)


def test_the_allowed_forms_of_in_place(comm: mp.Communicator) -> None:
    p, r = comm.size, comm.rank
    whole = np.zeros((p, 4))
    whole[r] = r + 1.0
    comm.all_gather(whole[r : r + 1], dim=0, out=whole)
    np.testing.assert_array_equal(whole[:, 0], np.arange(p) + 1.0)
    comm.reduce_scatter(whole, dim=0, out=whole[r : r + 1])
    np.testing.assert_array_equal(whole[r], np.full(4, p * (r + 1.0)))
    x = np.full(5, float(r))
    comm.broadcast(x, out=x)
    assert not x.any()


def test_byte_order_is_brought_to_the_machines(comm: mp.Communicator) -> None:
    x = np.arange(2000).astype(">f8")
    plain = np.arange(2000.0)
    for algorithm in ("auto", "mpi"):
        result = comm.all_reduce(x, algorithm=algorithm)
        np.testing.assert_array_equal(result, comm.size * plain)
        assert result.dtype.isnative
    np.testing.assert_array_equal(comm.broadcast(x if comm.rank == 0 else None), plain)
    scattered = comm.scatter(x if comm.rank == 0 else None)
    np.testing.assert_array_equal(scattered, np.array_split(plain, comm.size)[comm.rank])
    mixed = comm.all_gather(x if comm.rank % 2 else plain)  # half of the ranks bring each
    np.testing.assert_array_equal(mixed, np.tile(plain, comm.size))


def test_odd_arrays(comm: mp.Communicator) -> None:
    for x in (
        np.float64(3.0),
        np.asfortranarray(np.ones((3, 4))),
        np.ones((4, 4))[::2, ::-1],
        np.broadcast_to(np.ones(1), (5,)),
        np.ones((2, 0, 3)),
        [1.0, 2.0],
    ):
        np.testing.assert_array_equal(comm.all_reduce(x), comm.size * np.asarray(x))
    for x in (np.longdouble(1), np.array(["a"]), np.zeros(2, "M8[s]"), [[1], [1, 2]], None):
        with pytest.raises(TypeError, match="x"):
            comm.all_reduce(x)
    with pytest.raises(TypeError, match="out"):
        comm.all_reduce(np.ones((1, 4)), out=np.ma.zeros((1, 4)))


@pytest.mark.parametrize("rank", [1.5, "0", None, True, -1, 99])
def test_ranks_are_whole_numbers_of_the_group(comm: mp.Communicator, rank: Any) -> None:
    x = np.ones(3)
    for call in (
        lambda: comm.reduce(x, dst=rank),
        lambda: comm.gather(x, dst=rank),
        lambda: comm.broadcast(x, src=rank),
        lambda: comm.scatter(x, src=rank),
    ):
        with pytest.raises(ValueError, match="rank of the group"):
            call()


def test_other_arguments(comm: mp.Communicator) -> None:
    x = np.ones((3, 3))
    for call in (
        lambda: comm.all_gather(x, dim=None),
        lambda: comm.all_gather(x, dim=1.0),
        lambda: comm.all_gather(x, sizes=3),
        lambda: comm.all_gather(x, sizes=(None,) * comm.size),
        lambda: comm.all_reduce(x, algorithm=["ring"]),
        lambda: comm.all_reduce(x, algorithm=""),
        lambda: comm.recv("ab", "float64"),
        lambda: comm.recv(-1, "float64"),
        lambda: comm.recv((2,), "foo"),
        lambda: comm.recv((2,), "S5"),
        lambda: comm.shift(x, 1.5),
        lambda: comm.all_to_all_4d(None, 2, 1),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert isinstance(caught.value, mp.MpiparError)


@pytest.mark.parametrize(
    "options",
    [{"timeout": "5"}, {"timeout": None}, {"segment_bytes": 1.5}, {"algorithm": "zz"}],
)
def test_one_rank_with_a_wrong_option(world: MPI.Intracomm, options: dict[str, Any]) -> None:
    mine = options if world.rank == world.size - 1 else {}
    with pytest.raises(ValueError, match=next(iter(options))):
        mp.Communicator(world, **mine)


def test_options_must_be_alike(world: MPI.Intracomm) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(ValueError, match="different options"):
        mp.Communicator(world, check=world.rank == 0)


def test_a_communicator_is_not_copied(comm: mp.Communicator) -> None:
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            call(comm)


def test_threads_with_communicators_of_their_own(raw: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI was not started with MPI_THREAD_MULTIPLE")
    comms = [mp.Communicator(raw) for _ in range(3)]
    wrong: list[Any] = []

    def work(comm: mp.Communicator, n: int) -> None:
        for i in range(30):
            result = comm.all_reduce(np.full(n, float(i)))
            if not (result == i * comm.size).all():
                wrong.append((n, i))

    threads = [
        threading.Thread(target=work, args=(comm, n))
        for comm, n in zip(comms, (8, 20_000, 20_001), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for comm in comms:
        comm.destroy()
