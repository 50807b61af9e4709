"""y_i = exp(x_i - max x) / sum_j exp(x_j - max x), over the last dimension; and its logarithm.

Backward: dx = y * (dy - sum(dy * y)); for the logarithm z: dx = dz - exp(z) * sum(dz).

Cost on the CPU: one exponential an element; rows are read once and written once.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import (
    host,
    matrix,
    place,
    row_blocks,
    row_max,
    row_sums,
    scratch,
    store,
    widen,
)
from mpipar.kernels.native import Floats, loop, usable
from mpipar.kernels.native_math import ONE, ZERO, exp, largest
from mpipar.kernels.softmax_cuda import backward_cuda, forward_cuda


def reference(x: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the (logarithm of the) softmax in float64."""
    z = x.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    return z if log else np.exp(z)


def forward_cpu(x: np.ndarray, log: bool) -> np.ndarray:
    """Return the softmax or its logarithm, block by block."""
    rows, out = matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result = compute_dtype(x.dtype), matrix(out)
    space = scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        part = widen(rows[block])
        y = place(result, block, space)
        np.subtract(part, row_max(part), out=y)
        if log:
            y -= np.log(row_sums(np.exp(y)))[:, None]
        else:
            np.exp(y, out=y)
            y *= 1 / row_sums(y)[:, None]
        store(result, block, y)
    return out


def backward_cpu(g: np.ndarray, y: np.ndarray, log: bool) -> np.ndarray:
    """Return the gradient of x from that of y and y itself."""
    grads, outs, dx = matrix(g), matrix(y), np.empty(y.shape, y.dtype)
    n, d = outs.shape
    wide, result = compute_dtype(y.dtype), matrix(dx)
    space = scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        dy, part = widen(grads[block]), widen(outs[block])
        t = place(result, block, space)
        if log:
            np.exp(part, out=t)
            t *= -row_sums(dy)[:, None]
            t += dy
        else:
            np.subtract(dy, np.vecdot(dy, part)[:, None], out=t)
            t *= part
        store(result, block, t)
    return dx


@loop
def forward_loop(x: Floats, y: Floats, n: int, d: int) -> None:
    """Write the softmax of the rows of x (n, d)."""
    for i in range(n):
        at, top, total = i * d, largest(x, i * d, i * d + d), ZERO
        for j in range(d):
            e = exp(x[at + j] - top)
            y[at + j] = e
            total += e
        share = ONE / total
        for j in range(d):
            y[at + j] *= share


@loop
def backward_loop(g: Floats, y: Floats, dx: Floats, n: int, d: int) -> None:
    """Write the gradient of x (n, d)."""
    for i in range(n):
        at, total = i * d, ZERO
        for j in range(d):
            total += g[at + j] * y[at + j]
        for j in range(d):
            dx[at + j] = y[at + j] * (g[at + j] - total)


def forward(x: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the softmax of x (..., D) over the last dimension, or its logarithm."""
    if is_device(x):
        return forward_cuda(x, log)
    if not log and usable(x):
        y = np.empty(x.shape, x.dtype)
        forward_loop(x, y, x.size // max(x.shape[-1], 1), x.shape[-1])
        return y
    return forward_cpu(x, log)


def backward(g: np.ndarray, y: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the gradient of x: g and y (the forward result) have its shape."""
    if is_device(y):
        return backward_cuda(g, y, log)
    host("softmax", g)
    if not log and usable(g, y):
        dx = np.empty(y.shape, y.dtype)
        backward_loop(g, y, dx, y.size // max(y.shape[-1], 1), y.shape[-1])
        return dx
    return backward_cpu(g, y, log)
