"""Device arrays on their way through host memory, for an MPI that may not see the GPU."""

from typing import Any

from mpipar.arrays import is_device
from mpipar.comm.buffers import to_device
from mpipar.comm.group import Handle


class StagedHandle:
    """A handle whose result is brought to the device when it is waited for."""

    def __init__(self, inner: Handle, out: Any) -> None:
        self._inner, self._out = inner, out

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        return self._inner.test()

    def wait(self) -> Any:
        """Wait for the result and return it."""
        return bring(self._inner.wait(), self._out)


def bring(result: Any, out: Any) -> Any:
    """Return a host result as a device array, or fill `out` (on either side) with it."""
    if result is None:
        return None
    if out is None:
        return to_device(result)
    out[...] = to_device(result) if is_device(out) else result
    return out
