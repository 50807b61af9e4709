"""SiLU and SwiGLU on a GPU (the formulas: kernels/silu.py)."""

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import (
    FOUR,
    THREADS,
    constant,
    cuda,
    elementwise,
    kernel,
    narrow,
    widen,
)
from mpipar.kernels.gelu_cuda import logistic


@kernel("T[], T[], int64", threads=THREADS)
def forward(x, y, n):  # type: ignore[no-untyped-def]
    """Write silu(x)."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            a = widen(x[i])
            y[i] = narrow(a * logistic(a, x), y)


@kernel("T[], T[], T[], int64", threads=THREADS)
def backward(g, x, dx, n):  # type: ignore[no-untyped-def]
    """Write the gradient of x."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            a = widen(x[i])
            s = logistic(a, x)
            dx[i] = narrow(widen(g[i]) * (s + a * s * (constant(1, x) - s)), dx)


@kernel("T[], T[], T[], int64", threads=THREADS)
def swiglu(gate, up, y, n):  # type: ignore[no-untyped-def]
    """Write silu(gate) * up."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            a = widen(gate[i])
            y[i] = narrow(a * logistic(a, gate) * widen(up[i]), y)


@kernel("T[], T[], T[], T[], T[], int64", threads=THREADS)
def swiglu_backward(g, gate, up, dgate, dup, n):  # type: ignore[no-untyped-def]
    """Write the gradients of gate and up."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            a, dy = widen(gate[i]), widen(g[i])
            s = logistic(a, gate)
            dup[i] = narrow(dy * a * s, dup)
            slope = s + a * s * (constant(1, gate) - s)
            dgate[i] = narrow(dy * widen(up[i]) * slope, dgate)


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
