"""Collectives of device arrays, staged and by an MPI that sees the device, on a stand-in for CuPy.

The stand-in refuses implicit conversions, uses of memory that nothing puts in order, and messages
of memory that the host has not waited for (tests/fake_cupy).
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.arrays import dtype as dtype_of
from mpipar.comm import device, run, staging
from mpipar.errors import BufferMismatchError, ConfigError
from tests import fake_cupy
from tests.fake_cupy import asnumpy

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "uint8"]


@pytest.fixture(params=["staged", "direct"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, with pieces of 64 bytes, and no call so small that it travels otherwise."""
    monkeypatch.setattr(device, "PIECE_BYTES", 64)
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    monkeypatch.setattr("mpipar.comm.group.PERSISTENT_BYTES", -1)
    staging.side.cache_clear()
    yield fake_cupy.install(monkeypatch, aware=request.param == "direct")
    staging.side.cache_clear()


def parts(p: int, dtype: str, shape: tuple[int, ...] = (5, 7)) -> list[np.ndarray]:
    """What each rank brings: small whole numbers, so that every dtype is exact."""
    numbers = np.random.default_rng(1).integers(0, 5, (p, *shape))
    return [part.astype(dtype_of(dtype)) for part in numbers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective(raw: MPI.Intracomm, cupy: Any, dtype: str) -> None:
    with mp.Communicator(raw, device="cuda") as comm:
        p, r = comm.size, comm.rank
        host = parts(p, dtype)
        x, total = cupy.asarray(host[r]), np.sum(host, axis=0, dtype=host[0].dtype)
        uneven = [h[: 1 + q] for q, h in enumerate(host)]
        mine, sizes = cupy.asarray(uneven[r]), tuple(len(u) for u in uneven)
        cases: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
            "all_reduce": (lambda **how: comm.all_reduce(x, **how), total),
            "max": (lambda **how: comm.all_reduce(x, "max", **how), np.max(host, axis=0)),
            "ring": (lambda **how: comm.all_reduce(x, algorithm=exact(dtype), **how), total),
            "all_gather": (
                lambda **how: comm.all_gather(mine, dim=0, sizes=sizes, **how),
                np.concatenate(uneven),
            ),
            "inner": (lambda **how: comm.all_gather(x, **how), np.concatenate(host, axis=1)),
            "reduce_scatter": (
                lambda **how: comm.reduce_scatter(x, **how),
                np.array_split(total, p, axis=1)[r],
            ),
            "all_to_all": (
                lambda **how: comm.all_to_all(x, 1, 0, **how),
                np.concatenate([np.array_split(h, p, axis=1)[r] for h in host]),
            ),
            "broadcast": (lambda **how: comm.broadcast(x if r == 0 else None, **how), host[0]),
            "scatter": (
                lambda **how: comm.scatter(x if r == 0 else None, dim=0, **how),
                np.array_split(host[0], p)[r],
            ),
            "shift": (lambda **how: comm.shift(x, **how), host[(r - 1) % p]),
            "sendrecv": (lambda **how: comm.sendrecv(x, **how), host[(r - 1) % p]),
        }
        for name, (call, expected) in cases.items():
            for result in (call(), call(async_op=True).wait()):
                assert type(result) is fake_cupy.ndarray, name
                np.testing.assert_array_equal(asnumpy(result), expected, err_msg=name)
        for result, expected in (
            (comm.gather(mine, dim=0), np.concatenate(uneven)),
            (comm.reduce(x), total),
        ):
            assert (result is None) == (r != 0)
            if r == 0:
                np.testing.assert_array_equal(asnumpy(result), expected)
        sent = comm.send(x, async_op=True)
        got = comm.recv(x.shape, x.dtype)
        sent.wait()
        np.testing.assert_array_equal(asnumpy(got), host[(r - 1) % p])
        assert (fake_cupy.mpi.device_messages > 0) == fake_cupy.mpi.aware  # also to itself


def exact(dtype: str) -> str:
    """The algorithm that 16-bit sums take, and else a ring."""
    return "direct" if dtype.endswith("float16") else "ring"


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_is_in_flight_and_in_place(
    raw: MPI.Intracomm, cupy: Any, monkeypatch: pytest.MonkeyPatch, synchronous: bool
) -> None:
    monkeypatch.setattr(run, "synchronous_sends", synchronous)
    with mp.Communicator(raw, device="cuda") as comm:
        p, r = comm.size, comm.rank
        host = parts(p, "float64", (40,))
        for algorithm in mp.algorithms("all_reduce"):
            if algorithm in ("mpi", "hierarchical"):
                continue
            x = cupy.asarray(host[r])
            y = x * 2.0  # still on its way when its message is asked for
            first = comm.all_reduce(y, out=y, algorithm=algorithm, async_op=True)
            second = comm.all_reduce(x, "mean", algorithm=algorithm, async_op=True)
            assert np.allclose(asnumpy(second.wait()), np.mean(host, axis=0)), algorithm
            assert first.wait() is y
            assert np.allclose(asnumpy(y), 2 * np.sum(host, axis=0)), algorithm


def test_host_arrays_stay_where_they_are(raw: MPI.Intracomm, cupy: Any) -> None:
    with mp.Communicator(raw, device="cuda") as comm:
        p = comm.size
        total = comm.all_reduce(np.ones(100))
        assert type(total) is np.ndarray
        np.testing.assert_array_equal(total, np.full(100, p))
        told = comm.broadcast(np.arange(3.0) if comm.rank == 0 else None)
        assert type(told) is np.ndarray
        with pytest.raises(BufferMismatchError, match="device"):
            comm.all_reduce(cupy.ones(3), out=np.empty(3))
        with pytest.raises(ConfigError, match="auto"):
            comm.all_reduce(cupy.ones(3), algorithm="mpi")


def test_small_calls_and_communicators_of_the_host(
    raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy: Any = fake_cupy.install(monkeypatch)
    for where in ("cuda", "cpu"):
        with mp.Communicator(raw, device=where) as comm:
            x = cupy.ones(4)
            for _ in range(2):
                result = comm.all_reduce(x)
                assert type(result) is fake_cupy.ndarray
                np.testing.assert_array_equal(asnumpy(result), np.full(4, comm.size))
            assert comm.all_reduce(x, out=x) is x


def test_the_stand_in_finds_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = fake_cupy.install(monkeypatch, aware=True)
    x = cupy.ones(8) + 1
    with pytest.raises(TypeError, match=r"[Ii]mplicit"):
        np.asarray(x)
    with pytest.raises(Exception, match="may not have written"):
        MPI.COMM_SELF.Isend([x, 8, MPI.DOUBLE], 0)  # nobody has waited
    side, pinned = cupy.cuda.Stream(), np.empty(64, np.uint8)
    with pytest.raises(fake_cupy.RaceError):
        cupy.cuda.runtime.memcpyAsync(pinned.ctypes.data, x.data.ptr, 64, 2, side.ptr)
    event = cupy.cuda.Event()
    event.record()
    side.wait_event(event)
    pinned[:] = 7
    cupy.cuda.runtime.memcpyAsync(pinned.ctypes.data, x.data.ptr, 64, 2, side.ptr)
    assert (pinned == 7).all()  # the copy is not there before its event
    side.synchronize()
    np.testing.assert_array_equal(pinned.view(np.float64), 2.0)
    fake_cupy.mpi.aware = False
    with pytest.raises(Exception, match="cannot see"):
        MPI.COMM_SELF.Isend([x, 8, MPI.DOUBLE], 0)


def test_without_cupy_the_error_says_what_to_install(raw: MPI.Intracomm) -> None:
    if "cupy" in sys.modules:
        pytest.skip("CuPy is installed here")
    with pytest.raises(ValueError, match="cuda13"):
        mp.Communicator(raw, device="cuda")
