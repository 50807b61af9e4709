"""y = x / sqrt(mean(x^2) + eps) * w, over the last dimension.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019).  With n = x * r, h = dy * w:

    dx = r * (h - n * mean(h * n))        dw = sum over rows of dy * n

Forward leaves r = 1 / sqrt(mean(x^2) + eps) of each row for backward.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import host, matrix, place, row_blocks, scratch, store, widen


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
        y = place(result, block, space)
        r[block] = 1 / np.sqrt(np.vecdot(part, part) / d + eps)
        np.multiply(part, r[block, None], out=y)
        y *= scale
        store(result, block, y)
    return out, r


def backward_cpu(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, r: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of x and w; h * n is summed as dy * x times w and r."""
    grads, rows, dx = matrix(g), matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result, scale = compute_dtype(x.dtype), matrix(dx), widen(w)
    dw = np.zeros(d, wide)
    product, space = scratch(n, d, wide), scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        dy, part, inverse = widen(grads[block]), widen(rows[block]), r[block]
        p, t = product[: len(part)], place(result, block, space)
        np.multiply(dy, part, out=p)
        dw += inverse @ p
        a = inverse**3 * (p @ scale) / d
        np.multiply(dy, scale, out=t)
        t *= inverse[:, None]
        t -= np.multiply(part, a[:, None], out=p)
        store(result, block, t)
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
