"""y = (x - mean) / sqrt(var + eps) * w + b, over the last dimension.

Ba, Kiros, Hinton, Layer Normalization (2016).  With n = (x - mean) * rstd and h = dy * w:

    dx = rstd * (h - mean(h) - n * mean(h * n))     dw = sum over rows of dy * n     db = sum of dy

Forward leaves mean and rstd of each row for backward.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import host, matrix, place, row_blocks, row_sums, scratch, store, widen
from mpipar.kernels.native import Floats, loop, usable
from mpipar.kernels.native_math import ONE, ZERO, F
from mpipar.kernels.norm_cuda import layer_backward_cuda, layer_forward_cuda

ROWS = 32  # whose sums are taken alone
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


@loop
def forward_loop(
    x: Floats, w: Floats, b: Floats, y: Floats, mean: Floats, rstd: Floats,
    n: int, d: int, eps: float,
) -> None:  # fmt: skip
    """Write y (n, d) and the statistics of its rows (n,)."""
    for i in range(n):
        at, total, square = i * d, ZERO, ZERO
        for j in range(d):
            total += x[at + j]
        middle = total / F(d)
        for j in range(d):
            away = x[at + j] - middle
            square += away * away
        r = ONE / np.sqrt(square / F(d) + eps)
        for j in range(d):
            y[at + j] = (x[at + j] - middle) * r * w[j] + b[j]
        mean[i], rstd[i] = middle, r


@loop
def backward_loop(
    g: Floats, x: Floats, w: Floats, mean: Floats, rstd: Floats,
    dx: Floats, dw: Floats, db: Floats, part: Floats, n: int, d: int,
) -> None:  # fmt: skip
    """Write dx (n, d), and dw and db (d,); part is scratch (2, d).

    Of every ROWS rows the sums are taken alone, and then added to those of the rows before.
    """
    for j in range(d):
        dw[j], db[j] = ZERO, ZERO
    for start in range(0, n, ROWS):
        for j in range(2 * d):
            part[j] = ZERO
        for i in range(start, min(start + ROWS, n)):
            at, middle, r, a, b = i * d, mean[i], rstd[i], ZERO, ZERO
            for j in range(d):
                dy, away = g[at + j], (x[at + j] - middle) * r
                a += dy * w[j]
                b += dy * w[j] * away
                part[j] += dy * away
                part[d + j] += dy
            a, b = a / F(d), b / F(d)
            for j in range(d):
                dx[at + j] = r * (g[at + j] * w[j] - a - (x[at + j] - middle) * r * b)
        for j in range(d):
            dw[j] += part[j]
            db[j] += part[d + j]


def forward(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, Stats]:
    """Return y (like x) and the statistics for backward: x (..., D), w and b (D,)."""
    if is_device(x):
        return layer_forward_cuda(x, w, b, eps)
    host("layer_norm", w, b)
    if usable(x, w, b):
        n, d, y = x.size // max(x.shape[-1], 1), x.shape[-1], np.empty(x.shape, x.dtype)
        mean, rstd = np.empty(n, x.dtype), np.empty(n, x.dtype)
        forward_loop(x, w, b, y, mean, rstd, n, d, eps)
        return y, (mean, rstd)
    return forward_cpu(x, w, b, eps)


def backward(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, stats: Stats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of x, w and b from g, that of y."""
    if is_device(x):
        return layer_backward_cuda(g, x, w, stats)
    host("layer_norm", g, w)
    if usable(g, x, w, *stats):
        dx, dw, db, part = (np.empty(s, x.dtype) for s in (x.shape, w.shape, w.shape, 2 * w.size))
        backward_loop(g, x, w, *stats, dx, dw, db, part, stats[0].size, w.size)
        return dx, dw, db
    return backward_cpu(g, x, w, stats)
