"""Device arrays go through host memory: a stand-in for CuPy whose arrays MPI must never see."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp


class DeviceArray:
    """Looks like a GPU array and refuses to be read as a host one."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = np.array(host)
        self.__cuda_array_interface__ = {"shape": host.shape, "version": 3}

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a host array")

    def __setitem__(self, where: Any, value: "DeviceArray") -> None:
        self.host[where] = value.host


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def asnumpy(x: DeviceArray) -> np.ndarray:
        done.append("to host")
        return x.host.copy()

    def asarray(x: np.ndarray) -> DeviceArray:
        done.append("to device")
        return DeviceArray(x)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asnumpy=asnumpy, asarray=asarray))
    return done


def test_every_collective_is_staged(raw: MPI.Intracomm, copies: list[str]) -> None:
    with mp.Communicator(raw, device="cuda") as comm:
        p, r = comm.size, comm.rank
        x = DeviceArray(np.arange(6.0).reshape(2, 3) + r)
        rows = [np.arange(6.0).reshape(2, 3) + q for q in range(p)]
        checks = {
            "all_reduce": (comm.all_reduce(x), np.sum(rows, axis=0)),
            "all_gather": (comm.all_gather(x, dim=0), np.concatenate(rows)),
            "reduce_scatter": (
                comm.reduce_scatter(x, dim=1),
                np.array_split(np.sum(rows, axis=0), p, axis=1)[r],
            ),
            "broadcast": (comm.broadcast(x if r == 0 else None), rows[0]),
            "scatter": (
                comm.scatter(x if r == 0 else None, dim=1),
                np.array_split(rows[0], p, axis=1)[r],
            ),
            "shift": (comm.shift(x), rows[(r - 1) % p]),
            "sendrecv": (comm.sendrecv(x), rows[(r - 1) % p]),
            "handle": (comm.all_reduce(x, async_op=True).wait(), np.sum(rows, axis=0)),
        }
        for name, (result, expected) in checks.items():
            assert isinstance(result, DeviceArray), name
            np.testing.assert_array_equal(result.host, expected, err_msg=name)
        gathered = comm.gather(x, dim=0)
        assert (gathered is None) == (r != 0)
        assert copies.count("to device") >= len(checks)


def test_out_is_filled_in_place(raw: MPI.Intracomm, copies: list[str]) -> None:
    with mp.Communicator(raw, device="cuda") as comm:
        out = DeviceArray(np.zeros(4))
        assert comm.all_reduce(DeviceArray(np.ones(4)), out=out) is out
        np.testing.assert_array_equal(out.host, np.full(4, comm.size))


def test_without_cupy_the_error_says_what_to_install(raw: MPI.Intracomm) -> None:
    if "cupy" in sys.modules:
        pytest.skip("CuPy is installed here")
    with pytest.raises(ValueError, match="cuda13"):
        mp.Communicator(raw, device="cuda")
