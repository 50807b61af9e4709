"""y = (x - mean) / sqrt(var + eps) * w + b, over the last dimension.

Ba, Kiros, Hinton, Layer Normalization (2016).  With n = (x - mean) * rstd and h = dy * w:

    dx = rstd * (h - mean(h) - n * mean(h * n))     dw = sum over rows of dy * n     db = sum of dy

Forward leaves mean and rstd of each row for backward.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import host, matrix, place, row_blocks, row_sums, scratch, store, widen

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
        y = place(result, block, space)
        mean[block] = row_sums(part) / d
        np.subtract(part, mean[block, None], out=y)
        rstd[block] = 1 / np.sqrt(np.vecdot(y, y) / d + eps)
        y *= rstd[block, None]
        y *= scale
        y += shift
        store(result, block, y)
    return out, (mean, rstd)


def backward_cpu(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, stats: Stats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of x, w and b.

    All sums come from dy and dy * x, without n: with A = sum(h), B = sum(h x) of a row of D,
    dx = rstd h + a x + c,  a = rstd^3 (A mean - B) / D,  c = -a mean - rstd A / D.
    """
    grads, rows, dx = matrix(g), matrix(x), np.empty(x.shape, x.dtype)
    n, d = rows.shape
    wide, result, scale = compute_dtype(x.dtype), matrix(dx), widen(w)
    dw, db = np.zeros(d, wide), np.zeros(d, wide)
    product, space = scratch(n, d, wide), scratch(n, d, wide)
    for block in row_blocks(n, d, wide.itemsize):
        dy, part = widen(grads[block]), widen(rows[block])
        mean, rstd = stats[0][block], stats[1][block]
        p, t = product[: len(part)], place(result, block, space)
        np.multiply(dy, part, out=p)
        dw += rstd @ p
        dw -= (rstd * mean) @ dy
        db += np.ones(len(dy), wide) @ dy
        sums = dy @ scale
        a = rstd**3 * (sums * mean - p @ scale) / d
        np.multiply(dy, scale, out=t)
        t *= rstd[:, None]
        t += np.multiply(part, a[:, None], out=p)
        t -= (a * mean + rstd * sums / d)[:, None]
        store(result, block, t)
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
