"""reproducible=True: the same bytes for every bucket size, overlapped or not, shared or not."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.arrays import dtype as dtype_of

BUCKETS = {"1 B": 2**-20, "1 KB": 2**-10, "25 MB": 25}


class Net(mp.nn.Module):
    """Three layers, one of them used twice, and a parameter without elements."""

    def __init__(self, dtype: Any) -> None:
        self.up = mp.nn.Linear(12, 40, seed=1, name="up", dtype=dtype)
        self.mid = mp.nn.Linear(40, 40, seed=2, name="mid", dtype=dtype)
        self.down = mp.nn.Linear(40, 3, seed=3, name="down", dtype=dtype)
        self.nothing = mp.nn.Parameter(np.zeros((0, 3), dtype))

    def forward(self, x: Any) -> Any:
        x = self.mid(self.mid(self.up(x).tanh()).tanh()).tanh()
        return self.down(x) + self.nothing.sum()


def batch(rank: int, dtype: Any) -> mp.Tensor:
    x = np.random.default_rng(rank).standard_normal((6, 12)) * 10.0 ** (rank % 3)
    return mp.Tensor(x.astype(dtype))


def digest(world: MPI.Intracomm, params: list[Any]) -> bytes:
    mine = b"".join(np.ascontiguousarray(param.grad).tobytes() for param in params)
    assert len(set(world.allgather(mine))) == 1, "the ranks have different bytes"
    return mine


def overlapped(comm: mp.Communicator, dtype: Any, bucket_mb: float, shared: bool) -> list[bytes]:
    with mp.DataParallel(Net(dtype), comm, bucket_mb=bucket_mb, shared=shared) as net:
        found = []
        for _ in range(2):
            net.zero_grad()
            (net(batch(comm.rank, dtype)) ** 2).sum().backward()
            found.append(digest(comm.process_group.raw, net.parameters()))
        return found


def afterwards(comm: mp.Communicator, dtype: Any, bucket_mb: float, shared: bool) -> list[bytes]:
    net = Net(dtype)
    params = net.parameters()
    with mp.GradientSynchronizer(comm, bucket_mb, shared=shared) as synchronizer:
        synchronizer.register(params)
        found = []
        for step in range(2):
            net.zero_grad()
            (net(batch(comm.rank, dtype)) ** 2).sum().backward()
            for i in np.random.default_rng((comm.rank, step)).permutation(len(params)):
                synchronizer.submit(params[i], params[i].grad)
            synchronizer.sync()
            found.append(digest(comm.process_group.raw, params))
        return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_same_bytes(world: MPI.Intracomm, dtype: str) -> None:
    with mp.Communicator(world, reproducible=True) as comm:
        found = [
            bits
            for run in (overlapped, afterwards)
            for bucket_mb in BUCKETS.values()
            for shared in (False, True)
            for bits in run(comm, dtype_of(dtype), bucket_mb, shared)
        ]
    assert len(found) == 24
    assert len(set(found)) == 1
