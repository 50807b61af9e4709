"""y = x / sqrt(mean(x^2) + eps) * w, over the last dimension.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019).  With n = x * r, h = dy * w:

    dx = r * (h - n * mean(h * n))        dw = sum over rows of dy * n

Forward leaves r = 1 / sqrt(mean(x^2) + eps) of each row for backward.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import host, matrix, row_blocks, scratch, widen


def reference(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """Return the normalised rows in float64."""
    z = x.astype(np.float64)
    return z / np.sqrt((z * z).mean(-1, keepdims=True) + eps) * w.astype(np.float64)


def forward_cpu(x: np.ndarray, w: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return y and r of each row (N,)."""
    rows, out = matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result, scale = compute_dtype(x.dtype), matrix(out), widen(w)
    r = np.empty(n, wide)
    space = scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        part = widen(rows[block])
        y = space[: len(part)]
        r[block] = 1 / np.sqrt(np.vecdot(part, part) / d + eps)
        np.multiply(part, r[block, None], out=y)
        np.multiply(y, scale, out=result[block], casting="same_kind")
    return out, r


def backward_cpu(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, r: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of x and w."""
    grads, rows, dx = matrix(g), matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result, scale = compute_dtype(x.dtype), matrix(dx), widen(w)
    dw = np.zeros(d, wide)
    norm, space = scratch(n, d, wide), scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        dy, part = widen(grads[block]), widen(rows[block])
        z, t = norm[: len(part)], space[: len(part)]
        np.multiply(part, r[block, None], out=z)
        np.multiply(dy, z, out=t)
        dw += np.ones(len(t), wide) @ t
        np.multiply(dy, scale, out=t)
        z *= (np.vecdot(t, z) / d)[:, None]
        t -= z
        t *= r[block, None]
        result[block] = t
    return dx, dw.astype(w.dtype, copy=False)


def forward(x: np.ndarray, w: np.ndarray, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """Return y (like x) and r (N,) for backward: x (..., D), w (D,)."""
    host("rms_norm", x, w)
    return forward_cpu(x, w, eps)


def backward(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, r: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of x and w from g, that of y."""
    host("rms_norm", g, x, w)
    return backward_cpu(g, x, w, r)
