"""Device arrays in a communicator of the host: they go through host memory as a whole."""

from typing import Any

from mpipar.arrays import is_device
from mpipar.autograd import Tensor
from mpipar.comm.buffers import to_device, to_host
from mpipar.comm.handle import Handle
from mpipar.errors import ConfigError, explain


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


def message_of(x: Any, name: str, device: str) -> Any:
    """Return what `send` or `sendrecv` is given, as a communicator of this device takes it.

    Raises ConfigError for a Tensor that requires grad.
    """
    if isinstance(x, Tensor):
        if x.requires_grad:
            rule, fix = f"{name} is not differentiable", "Use x.data, or shift or all_to_all"
            raise ConfigError(explain("x", "a Tensor that requires grad", rule, fix))
        x = x.data
    return to_host(x) if device == "cpu" and is_device(x) else x
