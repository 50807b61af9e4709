"""Collectives of CuPy arrays on a real GPU, staged; ranks may share one.

mpiexec -n 4 python -m pytest tests/gpu
"""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from tests.gpu.needs import cupy_or_skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
@pytest.mark.parametrize("n", [1, 1000, 3_000_001])
def test_collectives(dtype: str, n: int) -> None:
    cupy: Any = cupy_or_skip()
    with mp.Communicator(MPI.COMM_WORLD, device="cuda") as comm:
        p, r = comm.size, comm.rank
        host = [np.random.default_rng(q).integers(0, 5, n).astype(dtype) for q in range(p)]
        x = cupy.asarray(host[r])
        y = x + x  # still on its way when its message is asked for
        handle = comm.all_reduce(y, async_op=True)
        total = np.sum(host, axis=0, dtype=dtype)
        cases = {
            "all_reduce": (comm.all_reduce(x), total),
            "all_gather": (comm.all_gather(x, dim=0), np.concatenate(host)),
            "reduce_scatter": (comm.reduce_scatter(x, dim=0), np.array_split(total, p)[r]),
            "broadcast": (comm.broadcast(x if r == 0 else None), host[0]),
            "shift": (comm.shift(x), host[(r - 1) % p]),
            "sendrecv": (comm.sendrecv(x), host[(r - 1) % p]),
            "handle": (handle.wait(), 2 * total),
        }
        for name, (result, expected) in cases.items():
            assert isinstance(result, cupy.ndarray), name
            np.testing.assert_array_equal(result.get(), expected, err_msg=name)
