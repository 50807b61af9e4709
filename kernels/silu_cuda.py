"""SiLU and SwiGLU on a GPU (the formulas: kernels/silu.py)."""

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import THREADS, constant, device, kernel
from mpipar.kernels.fours import elementwise, mine, put, take
from mpipar.kernels.gelu_cuda import logistic


@device
def silu(x, array):  # type: ignore[no-untyped-def]
    """Return x / (1 + e^-x)."""
    return x * logistic(x, array)


@device
def slope(x, array):  # type: ignore[no-untyped-def]
    """Return the derivative of silu at x."""
    s = logistic(x, array)
    return s + x * s * (constant(1, array) - s)


@kernel("T[], T[], int32, int64", threads=THREADS)
def forward(x, y, wide, n):  # type: ignore[no-untyped-def]
    """Write silu(x)."""
    i = mine()
    a, b, c, d = take(x, i, n, wide, constant(0, x))
    put(y, i, n, wide, silu(a, x), silu(b, x), silu(c, x), silu(d, x))


@kernel("T[], T[], T[], int32, int64", threads=THREADS)
def backward(g, x, dx, wide, n):  # type: ignore[no-untyped-def]
    """Write the gradient of x."""
    i, none = mine(), constant(0, x)
    a, b, c, d = take(x, i, n, wide, none)
    e, f, u, v = take(g, i, n, wide, none)
    put(dx, i, n, wide, e * slope(a, x), f * slope(b, x), u * slope(c, x), v * slope(d, x))


@kernel("T[], T[], T[], int32, int64", threads=THREADS)
def swiglu(gate, up, y, wide, n):  # type: ignore[no-untyped-def]
    """Write silu(gate) * up."""
    i, none = mine(), constant(0, gate)
    a, b, c, d = take(gate, i, n, wide, none)
    e, f, u, v = take(up, i, n, wide, none)
    put(y, i, n, wide, silu(a, y) * e, silu(b, y) * f, silu(c, y) * u, silu(d, y) * v)


@kernel("T[], T[], T[], T[], T[], int32, int64", threads=THREADS)
def swiglu_backward(g, gate, up, dgate, dup, wide, n):  # type: ignore[no-untyped-def]
    """Write the gradients of gate and up."""
    i, none = mine(), constant(0, gate)
    a, b, c, d = take(gate, i, n, wide, none)
    p, q, r, s = take(up, i, n, wide, none)
    e, f, u, v = take(g, i, n, wide, none)
    put(dup, i, n, wide, e * silu(a, g), f * silu(b, g), u * silu(c, g), v * silu(d, g))
    p, q, r, s = p * slope(a, g), q * slope(b, g), r * slope(c, g), s * slope(d, g)
    put(dgate, i, n, wide, e * p, f * q, u * r, v * s)


def forward_cuda(x: Array) -> Array:
    """Return silu(x), like x."""
    y = module_of(x).empty(x.shape, x.dtype)
    elementwise(forward, x, y)
    return y


def backward_cuda(g: Array, x: Array) -> Array:
    """Return the gradient of x from g, that of silu(x)."""
    dx = module_of(x).empty(x.shape, x.dtype)
    elementwise(backward, g, x, dx)
    return dx


def swiglu_cuda(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up."""
    y = module_of(gate).empty(gate.shape, gate.dtype)
    elementwise(swiglu, gate, up, y)
    return y


def swiglu_backward_cuda(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the gradients of gate and up from g, that of y."""
    xp = module_of(gate)
    dgate, dup = xp.empty(gate.shape, gate.dtype), xp.empty(up.shape, up.dtype)
    elementwise(swiglu_backward, g, gate, up, dgate, dup)
    return dgate, dup
