"""y = (x - mean) / sqrt(var + eps) * w + b, over the last dimension.

Ba, Kiros, Hinton, Layer Normalization (2016).  With n = (x - mean) * rstd and h = dy * w:

    dx = rstd * (h - mean(h) - n * mean(h * n))     dw = sum over rows of dy * n     db = sum of dy

Forward leaves mean and rstd of each row for backward, which computes n again.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import host, matrix, row_blocks, row_sums, scratch, widen

Stats = tuple[np.ndarray, np.ndarray]  # mean and 1 / standard deviation of each row, (N,)


def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    """Return the normalised rows in float64."""
    z = x.astype(np.float64)
    z = z - z.mean(-1, keepdims=True)
    z = z / np.sqrt((z * z).mean(-1, keepdims=True) + eps)
    return z * w.astype(np.float64) + b.astype(np.float64)


def forward_cpu(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float
) -> tuple[np.ndarray, Stats]:
    """Return y and the statistics of the rows."""
    rows, out = matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result = compute_dtype(x.dtype), matrix(out)
    scale, shift = widen(w), widen(b)
    mean, rstd = np.empty(n, wide), np.empty(n, wide)
    space = scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        part = widen(rows[block])
        y = space[: len(part)]
        mean[block] = row_sums(part) / d
        np.subtract(part, mean[block, None], out=y)
        rstd[block] = 1 / np.sqrt(np.vecdot(y, y) / d + eps)
        y *= rstd[block, None]
        y *= scale
        np.add(y, shift, out=result[block], casting="same_kind")
    return out, (mean, rstd)


def backward_cpu(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, stats: Stats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of x, w and b."""
    grads, rows, dx = matrix(g), matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result, scale = compute_dtype(x.dtype), matrix(dx), widen(w)
    mean, rstd = stats
    dw, db = np.zeros(d, wide), np.zeros(d, wide)
    norm, space = scratch(n, d, wide), scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        dy, part = widen(grads[block]), widen(rows[block])
        z, t = norm[: len(part)], space[: len(part)]
        np.subtract(part, mean[block, None], out=z)
        z *= rstd[block, None]
        np.multiply(dy, z, out=t)
        dw += np.ones(len(t), wide) @ t
        db += np.ones(len(t), wide) @ dy
        np.multiply(dy, scale, out=t)
        z *= (np.vecdot(t, z) / d)[:, None]
        t -= (row_sums(t) / d)[:, None]
        t -= z
        t *= rstd[block, None]
        result[block] = t
    return dx, dw.astype(w.dtype, copy=False), db.astype(w.dtype, copy=False)


def forward(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, Stats]:
    """Return y (like x) and the statistics for backward: x (..., D), w and b (D,)."""
    host("layer_norm", x, w, b)
    return forward_cpu(x, w, b, eps)


def backward(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, stats: Stats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of x, w and b from g, that of y."""
    host("layer_norm", g, x, w)
    return backward_cpu(g, x, w, stats)
