"""GELU on a GPU (the formulas: kernels/gelu.py)."""

import math

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import THREADS, constant, device, kernel
from mpipar.kernels.fours import elementwise, mine, put, take

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715
FAR = 80  # e^80 is a float32; 1 / (1 + e^80) counts as 0


@device
def logistic(x, array):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + e^-x)."""
    z = min(max(x, constant(-FAR, array)), constant(FAR, array))
    return constant(1, array) / (constant(1, array) + constant(math.exp(-z), array))


@device
def value(x, exact, array):  # type: ignore[no-untyped-def]
    """Return y at x."""
    if exact:
        half = constant(0.5, array)
        return half * x * (constant(1, array) + math.erf(x * constant(math.sqrt(0.5), array)))
    twice = constant(2 * ROOT, array) * x * (constant(1, array) + constant(CUBIC, array) * x * x)
    return x * logistic(twice, array)


@device
def slope(x, exact, array):  # type: ignore[no-untyped-def]
    """Return dy/dx at x."""
    one = constant(1, array)
    if exact:
        half = constant(0.5, array)
        tail = math.exp(-half * x * x) * constant(1 / math.sqrt(2 * math.pi), array)
        return half * (one + math.erf(x * constant(math.sqrt(0.5), array))) + x * tail
    square = x * x
    s = logistic(constant(2 * ROOT, array) * x * (one + constant(CUBIC, array) * square), array)
    inner = constant(2 * ROOT, array) * (one + constant(3 * CUBIC, array) * square)
    return s + x * s * (one - s) * inner


@kernel("T[], T[], int32, int32, int64", threads=THREADS)
def forward(x, y, exact, wide, n):  # type: ignore[no-untyped-def]
    """Write y."""
    i = mine()
    a, b, c, d = take(x, i, n, wide, constant(0, x))
    a, b, c, d = value(a, exact, x), value(b, exact, x), value(c, exact, x), value(d, exact, x)
    put(y, i, n, wide, a, b, c, d)


@kernel("T[], T[], T[], int32, int32, int64", threads=THREADS)
def backward(g, x, dx, exact, wide, n):  # type: ignore[no-untyped-def]
    """Write g dy/dx."""
    i, none = mine(), constant(0, x)
    a, b, c, d = take(x, i, n, wide, none)
    e, f, u, v = take(g, i, n, wide, none)
    a, b, c, d = slope(a, exact, x), slope(b, exact, x), slope(c, exact, x), slope(d, exact, x)
    put(dx, i, n, wide, e * a, f * b, u * c, v * d)


def forward_cuda(x: Array, approximate: str) -> Array:
    """Return y, like x."""
    y = module_of(x).empty(x.shape, x.dtype)
    elementwise(forward, x, y, int(approximate == "none"))
    return y


def backward_cuda(g: Array, x: Array, approximate: str) -> Array:
    """Return the gradient of x from g, that of y."""
    dx = module_of(x).empty(x.shape, x.dtype)
    elementwise(backward, g, x, dx, int(approximate == "none"))
    return dx
