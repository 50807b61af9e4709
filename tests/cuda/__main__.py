"""Run the cases of some operations: `python -m tests.cuda MODULE numpy|cupy tiny|large`."""

import importlib
import sys
import threading
from typing import Any


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


if __name__ == "__main__":
    module, xp, sizes = sys.argv[1:]
    if xp == "numpy":
        make_shared_arrays_once()
    importlib.import_module(f"tests.cuda.{module}").run(importlib.import_module(xp), sizes)
