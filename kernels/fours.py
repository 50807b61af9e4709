"""Four neighbouring elements at a time: what a thread of most kernels reads, computes and writes.

    thread    0        1        2           float32 are read 16 bytes at once, 16-bit numbers 8,
    elements  0 1 2 3  4 5 6 7  8 9 ...     float64 twice 16

`wide` says that the arrays allow it (`quads`); otherwise, and where fewer than four are left, they
are read one by one.  All that a thread needs is read before it writes: to the compiler, what is
written may be what is read next, and each read would wait for the write before it.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import THREADS, Deferred, blocks, cuda, device, narrow, simulated, widen

FOUR = 4


class _Access(Deferred):
    """Reads or writes four elements at an index, at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: Any = None

    def resolve(self) -> Any:
        """Return Numba's intrinsic; in the simulator a Python function."""
        if simulated():
            return _read if self.name == "read" else _write
        if self._made is None:
            from mpipar.kernels import fours_build

            self._made = getattr(fours_build, self.name)()
        return self._made


def _place(array: Any, index: Any) -> Any:
    """Return four elements of the simulator, where a GPU could read them at once."""
    memory = getattr(array, "_ary", array)[index : index + FOUR]
    assert memory.ctypes.data % min(16, memory.nbytes) == 0, "a GPU would stop here"
    return memory


def _read(array: Any, index: Any) -> tuple[Any, ...]:
    return tuple(_place(array, index))


def _write(array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    _place(array, index)[:] = (a, b, c, d)


read: Any = _Access("read")
write: Any = _Access("write")


@device
def mine():  # type: ignore[no-untyped-def]
    """Return the first of the four elements that this thread of an elementwise kernel has."""
    return (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * FOUR


@device
def take(x, i, stop, wide, fill):  # type: ignore[no-untyped-def]
    """Return elements i to i + 3 as numbers to compute with; those from `stop` on are `fill`."""
    if wide and i + FOUR <= stop:
        a, b, c, d = read(x, i)
        return widen(a), widen(b), widen(c), widen(d)
    return (
        widen(x[i]) if i < stop else fill,
        widen(x[i + 1]) if i + 1 < stop else fill,
        widen(x[i + 2]) if i + 2 < stop else fill,
        widen(x[i + 3]) if i + 3 < stop else fill,
    )


@device
def put(y, i, stop, wide, a, b, c, d):  # type: ignore[no-untyped-def]
    """Write elements i to i + 3, rounded to the type of y; none from `stop` on."""
    if wide and i + FOUR <= stop:
        write(y, i, narrow(a, y), narrow(b, y), narrow(c, y), narrow(d, y))
    else:
        if i < stop:
            y[i] = narrow(a, y)
        if i + 1 < stop:
            y[i + 1] = narrow(b, y)
        if i + 2 < stop:
            y[i + 2] = narrow(c, y)
        if i + 3 < stop:
            y[i + 3] = narrow(d, y)


def quads(width: int, *arrays: Array) -> bool:
    """Say whether rows of `width` elements of all arrays begin where four can be read at once."""
    return width % FOUR == 0 and all(pointer(a) % min(16, FOUR * a.itemsize) == 0 for a in arrays)


def pointer(x: Array) -> int:
    """Return the address at which x begins."""
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def elementwise(code: Any, *arguments: Any, n: int | None = None, dtype: str | None = None) -> None:
    """Start a kernel of four elements a thread on arrays of one size.

    Its last arguments are `wide` and the size.  Arrays that are not contiguous are copied: pass
    contiguous ones where it writes.
    """
    count = arguments[0].size if n is None else n
    ready = [module_of(a).ascontiguousarray(a) if hasattr(a, "shape") else a for a in arguments]
    wide = quads(0, *(a for a in ready if hasattr(a, "shape")))
    code(blocks(count, THREADS * FOUR), THREADS, *ready, int(wide), count, dtype=dtype)
