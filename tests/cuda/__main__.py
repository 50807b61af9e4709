"""Run the cases of an operation in the simulator: `python -m tests.cuda MODULE`.

They get the stand-in for CuPy, not NumPy: what comes before and after a kernel must be what CuPy
can do, so that a GPU meets nothing here that has not run.
"""

import importlib
import sys
import threading
from typing import Any

from mpipar.kernels import device
from tests import fake_cupy


class Once(dict[Any, Any]):
    """Shared arrays of the simulator, by line: it looks for one, then makes it, in every thread.

    Who finds none keeps the others from looking until it has made the array.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the array; if there is none, the caller makes it next."""
        self.lock.acquire()
        found = super().get(key, default)
        if found is not None:
            self.lock.release()
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.lock.release()


def make_shared_arrays_once() -> None:
    """Let threads of the simulator that run at the same time get the same shared arrays."""
    from numba.cuda.simulator import kernelapi

    plain = kernelapi.FakeCUDAShared.__init__

    def init(self: Any, size: int) -> None:
        plain(self, size)
        self._allocations = Once()

    kernelapi.FakeCUDAShared.__init__ = init


def open_arrays_of_kernels() -> None:
    """Give the simulator the memory of the stand-in's arrays, and no others."""
    plain = device._bits

    def memory(argument: Any, kind: str) -> Any:
        if kind.endswith("[]") and not isinstance(argument, fake_cupy.ndarray):
            raise TypeError(f"a kernel gets {type(argument)} instead of a device array")
        flat = plain(argument, kind)
        return flat._host if kind.endswith("[]") else flat

    device._bits = memory


if __name__ == "__main__":
    sys.modules["cupy"] = cupy = fake_cupy.make()
    make_shared_arrays_once()
    open_arrays_of_kernels()
    importlib.import_module(f"tests.cuda.{sys.argv[1]}").run(cupy, "tiny")
