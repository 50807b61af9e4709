"""A stand-in for CuPy over host memory, for machines without a GPU: what it is strict about.

- An array is none of NumPy's, and nothing converts it to one by the way: `asnumpy` does.
- Copies of `memcpyAsync` are done when their stream comes to them, not when they are asked for.
- Every use of memory is noted with its stream.  A use that no event, wait or synchronisation puts
  after an earlier one of the same bytes on another stream is a RaceError (see streams.py).
- MPI takes device memory only where it is `aware`, and only if the host has waited for all that
  uses it.

`install(monkeypatch, aware)` puts it in the place of cupy, and CPU kernels in that of CUDA's
(see twins.py).
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_cupy import twins
from tests.fake_cupy.arrays import array_module, asnumpy, mpi, ndarray
from tests.fake_cupy.streams import (
    Event,
    RaceError,
    Runtime,
    Stream,
    get_current_stream,
    get_elapsed_time,
)

__all__ = ["RaceError", "asnumpy", "install", "make", "mpi", "ndarray"]


class Device:
    """The one GPU there is."""

    compute_capability = "90"

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def use(self) -> None:
        """It is the current one."""


def make() -> ModuleType:
    """Return the module."""
    cupy: Any = ModuleType("cupy")
    vars(cupy).update(array_module())
    cupy.cuda = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_current_stream=get_current_stream,
        get_elapsed_time=get_elapsed_time,
        alloc_pinned_memory=lambda n: np.full(n, 0xEE, np.uint8),
        runtime=Runtime(),
    )
    return cupy


def install(monkeypatch: Any, aware: bool = False) -> ModuleType:
    """Put it in the place of cupy for one test; say whether MPI sees its memory."""
    made = make()
    monkeypatch.setattr(mpi, "aware", aware)
    monkeypatch.setattr(mpi, "device_messages", 0)
    monkeypatch.setenv("MPIPAR_CUDA_AWARE", str(int(aware)))
    monkeypatch.setitem(sys.modules, "cupy", made)
    twins.install(monkeypatch)
    return made
