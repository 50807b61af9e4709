"""y = x * s(x) with s(x) = 1 / (1 + exp(-x)); and SwiGLU: y = gate * s(gate) * up.

Elfwing, Uchibe, Doya (2017); Shazeer, GLU Variants Improve Transformer (2020).

    silu:    dy/dx = s + x s (1 - s)            forward gives it when asked
    swiglu:  dgate = g * up * (s + gate s (1 - s)),  dup = g * gate * s

s is computed as (1 + tanh(x/2)) / 2: no overflow, and tanh is the fastest of the functions.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import element_blocks, element_scratch, host, place, store, widen


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


def forward_cpu(
    x: np.ndarray, up: np.ndarray | None, derivative: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return y and, if asked, dy/dx (of silu)."""
    out = np.empty(x.shape, x.dtype)
    slope = np.empty(x.shape, x.dtype) if derivative else None
    flat, ys = x.reshape(-1), out.reshape(-1)
    ups, ds = None if up is None else up.reshape(-1), None if slope is None else slope.reshape(-1)
    wide = compute_dtype(x.dtype)
    space = element_scratch(3, flat.size, wide)
    for block in element_blocks(flat.size, wide.itemsize):
        part = widen(flat[block])
        s, y = space[0, : len(part)], place(ys, block, space[1])
        _sigmoid(part, s)
        np.multiply(part, s, out=y)
        if ds is not None:
            d = place(ds, block, space[2])
            _slope(s, y, d)
            store(ds, block, d)
        if ups is not None:
            y *= widen(ups[block])
        store(ys, block, y)
    return out, slope


def swiglu_backward_cpu(
    g: np.ndarray, gate: np.ndarray, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up."""
    dgate, dup = np.empty(gate.shape, gate.dtype), np.empty(up.shape, up.dtype)
    flat, ups, grads = gate.reshape(-1), up.reshape(-1), g.reshape(-1)
    dgates, dups = dgate.reshape(-1), dup.reshape(-1)
    wide = compute_dtype(gate.dtype)
    space = element_scratch(3, flat.size, wide)
    for block in element_blocks(flat.size, wide.itemsize):
        part, dy = widen(flat[block]), widen(grads[block])
        s, y, d = (
            space[0, : len(part)],
            place(dups, block, space[1]),
            place(dgates, block, space[2]),
        )
        _sigmoid(part, s)
        np.multiply(part, s, out=y)
        _slope(s, y, d)
        y *= dy
        d *= widen(ups[block])
        d *= dy
        store(dups, block, y)
        store(dgates, block, d)
    return dgate, dup


def forward(x: np.ndarray, derivative: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Return silu(x) and, if asked, its derivative, both like x."""
    host("silu", x)
    return forward_cpu(x, None, derivative)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up; both have one shape and dtype."""
    host("swiglu", gate, up)
    return forward_cpu(gate, up, False)[0]


def swiglu_backward(
    g: np.ndarray, gate: np.ndarray, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up from g, that of y."""
    host("swiglu", g, gate, up)
    return swiglu_backward_cpu(g, gate, up)
