"""y = x * s(x) with s(x) = 1 / (1 + exp(-x)); and SwiGLU: y = gate * s(gate) * up.

Elfwing, Uchibe, Doya (2017); Shazeer, GLU Variants Improve Transformer (2020).

    silu:    dx = g * (s + x s (1 - s))
    swiglu:  dgate = g * up * (s + gate s (1 - s)),  dup = g * gate * s

s is computed by NumPy as (1 + tanh(x/2)) / 2: no overflow, and tanh is the fastest there.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import element_blocks, element_scratch, host, place, store, widen
from mpipar.kernels.native import Floats, loop, usable
from mpipar.kernels.native_math import ONE, exp
from mpipar.kernels.silu_cuda import (
    backward_cuda,
    forward_cuda,
    swiglu_backward_cuda,
    swiglu_cuda,
)


def reference(x: np.ndarray, up: np.ndarray | None = None) -> np.ndarray:
    """Return silu(x), times `up` if given, in float64."""
    z = x.astype(np.float64)
    y = z * (0.5 + 0.5 * np.tanh(z / 2))
    return y if up is None else y * up.astype(np.float64)


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """Write s(x) into `out`."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    out *= 0.5
    out += 0.5


def _slope(s: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Write s + x s (1 - s) = s + y (1 - s) into `out`, for y = x s."""
    np.subtract(1, s, out=out)
    out *= y
    out += s


def forward_cpu(x: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """Return silu(x), times `up` if given."""
    out = np.empty(x.shape, x.dtype)
    flat, ys = x.reshape(-1), out.reshape(-1)
    ups = None if up is None else up.reshape(-1)
    wide = compute_dtype(x.dtype)
    space = element_scratch(2, flat.size, wide)
    for block in element_blocks(flat.size, wide.itemsize):
        part = widen(flat[block])
        s, y = space[0, : len(part)], place(ys, block, space[1])
        _sigmoid(part, s)
        np.multiply(part, s, out=y)
        if ups is not None:
            y *= widen(ups[block])
        store(ys, block, y)
    return out


def backward_cpu(
    g: np.ndarray, x: np.ndarray, up: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of x, and of `up` if given."""
    dx, dup = np.empty(x.shape, x.dtype), None if up is None else np.empty(up.shape, up.dtype)
    flat, grads, result = x.reshape(-1), g.reshape(-1), dx.reshape(-1)
    ups, dups = (None if one is None else one.reshape(-1) for one in (up, dup))
    wide = compute_dtype(x.dtype)
    space = element_scratch(3, flat.size, wide)
    for block in element_blocks(flat.size, wide.itemsize):
        part, dy = widen(flat[block]), widen(grads[block])
        s, y, d = space[0, : len(part)], space[1, : len(part)], place(result, block, space[2])
        _sigmoid(part, s)
        _slope(s, np.multiply(part, s, out=y), d)
        d *= dy
        if ups is not None and dups is not None:
            d *= widen(ups[block])
            y *= dy
            dups[block] = y
        store(result, block, d)
    return dx, dup


def share(x: np.float32) -> np.float32:
    """Return s(x)."""
    return ONE / (ONE + exp(-x))


def slope(x: np.float32, s: np.float32) -> np.float32:
    """Return the derivative of silu at x, for s = s(x)."""
    return s + x * s * (ONE - s)


@loop
def forward_loop(x: Floats, y: Floats, n: int) -> None:
    """Write y = silu(x)."""
    for i in range(n):
        y[i] = x[i] * share(x[i])


@loop
def backward_loop(x: Floats, g: Floats, dx: Floats, n: int) -> None:
    """Write dx of silu."""
    for i in range(n):
        dx[i] = g[i] * slope(x[i], share(x[i]))


@loop
def swiglu_loop(gate: Floats, up: Floats, y: Floats, n: int) -> None:
    """Write y = silu(gate) * up."""
    for i in range(n):
        y[i] = gate[i] * share(gate[i]) * up[i]


@loop
def swiglu_backward_loop(
    gate: Floats, up: Floats, g: Floats, dgate: Floats, dup: Floats, n: int
) -> None:
    """Write the gradients of gate and up."""
    for i in range(n):
        x, dy, s = gate[i], g[i], share(gate[i])
        dup[i] = dy * x * s
        dgate[i] = dy * up[i] * slope(x, s)


def forward(x: np.ndarray) -> np.ndarray:
    """Return silu(x), like x."""
    if is_device(x):
        return forward_cuda(x)
    if usable(x):
        y = np.empty(x.shape, x.dtype)
        forward_loop(x, y, x.size)
        return y
    return forward_cpu(x, None)


def backward(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of x from g, that of silu(x)."""
    if is_device(x):
        return backward_cuda(g, x)
    host("silu", g)
    if usable(g, x):
        dx = np.empty(x.shape, x.dtype)
        backward_loop(x, g, dx, x.size)
        return dx
    return backward_cpu(g, x, None)[0]


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up; both have one shape and dtype."""
    if is_device(gate):
        return swiglu_cuda(gate, up)
    host("swiglu", up)
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)  # often halves of one array
    if usable(gate, up):
        y = np.empty(gate.shape, gate.dtype)
        swiglu_loop(gate, up, y, y.size)
        return y
    return forward_cpu(gate, up)


def swiglu_backward(
    g: np.ndarray, gate: np.ndarray, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up from g, that of y."""
    if is_device(gate):
        return swiglu_backward_cuda(g, gate, up)
    host("swiglu", g, up)
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    if usable(g, gate, up):
        dgate, dup = np.empty(gate.shape, gate.dtype), np.empty(up.shape, up.dtype)
        swiglu_backward_loop(gate, up, g, dgate, dup, g.size)
        return dgate, dup
    of_gate, of_up = backward_cpu(g, gate, up)
    assert of_up is not None
    return of_gate, of_up
