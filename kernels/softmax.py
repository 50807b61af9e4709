"""y_i = exp(x_i - max x) / sum_j exp(x_j - max x), over the last dimension; and its logarithm.

Backward: dx = y * (dy - sum(dy * y)); for the logarithm z: dx = dz - exp(z) * sum(dz).

Cost on the CPU: one exponential an element; rows are read once and written once.
"""

import numpy as np

from mpipar.arrays import compute_dtype
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


def forward(x: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the softmax of x (..., D) over the last dimension, or its logarithm."""
    host("softmax", x)
    return forward_cpu(x, log)


def backward(g: np.ndarray, y: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the gradient of x: g and y (the forward result) have its shape."""
    host("softmax", g, y)
    return backward_cpu(g, y, log)
