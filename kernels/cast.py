"""y = scale x, rounded once to another number type.

On the CPU by NumPy's cast; on a GPU a kernel for each pair of types.
"""

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_device, module_of
from mpipar.kernels.device import BITS, FLOATS, THREADS, Kernel, constant, kernel
from mpipar.kernels.fours import elementwise, mine, put, take


def reference(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Return y in float64."""
    return x.astype(np.float64) * scale


def _of(source: str) -> Kernel:
    """Make the kernel that reads this type."""

    def to(x, y, scale, wide, n):  # type: ignore[no-untyped-def]
        i = mine()
        a, b, c, d = take(x, i, n, wide, constant(0, x))
        put(y, i, n, wide, a * scale, b * scale, c * scale, d * scale)

    to.__name__ = f"{source}_to"
    return kernel(f"{BITS.get(source, source)}[], T[], W, int32, int64", threads=THREADS)(to)


FROM = {source: _of(source) for source in FLOATS}
KERNELS = list(FROM.values())


def cast(x: Array, dtype: np.dtype, scale: float = 1.0) -> Array:
    """Return scale x as `dtype`, a new array."""
    y = module_of(x).empty(x.shape, dtype)
    if is_device(x):
        elementwise(FROM[x.dtype.name], x, y, scale)
    elif scale == 1.0:
        y[...] = x
    else:
        wide = np.promote_types(compute_dtype(x.dtype), compute_dtype(np.dtype(dtype)))
        y[...] = x.astype(wide) * wide.type(scale)
    return y
