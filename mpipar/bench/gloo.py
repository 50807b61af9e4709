"""The peer of `--peer torch`: torch.distributed's gloo all_reduce, in the processes of this job.

torch is no dependency: it is looked for when it is asked for, and a note says where it is missing.
"""

import importlib
import importlib.util
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mpi4py import MPI

NAME = "torch gloo"
SECONDS = 120


def available(comm: MPI.Comm) -> bool:
    """Say whether every rank has torch; collective."""
    return bool(comm.allreduce(importlib.util.find_spec("torch") is not None, MPI.LAND))


@contextmanager
def all_reduce(comm: MPI.Comm) -> Iterator[Callable[[int], Callable[[], Any]]]:
    """Give a function of a number of float32 that returns the call to time; collective."""
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=meeting_point(comm),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        yield lambda n: _call(torch.zeros(n), distributed)
    finally:
        distributed.destroy_process_group()


def _call(tensor: Any, distributed: Any) -> Callable[[], Any]:
    return lambda: distributed.all_reduce(tensor)


def meeting_point(comm: MPI.Comm) -> str:
    """Return the address at which the ranks can find each other, a free port; collective."""
    names = comm.allgather(platform.node())
    host = "127.0.0.1" if len(set(names)) == 1 else names[0]
    return comm.bcast(_address(host) if comm.rank == 0 else "", root=0)


def _address(host: str) -> str:
    """Return the address of a port that is free now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return f"tcp://{host}:{free.getsockname()[1]}"
