"""y = x / sqrt(mean(x^2) + eps) * w, over the last dimension.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019).  With n = x * r, h = dy * w:

    dx = r * (h - n * mean(h * n))        dw = sum over rows of dy * n

Forward leaves r = 1 / sqrt(mean(x^2) + eps) of each row for backward.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import host, matrix, place, row_blocks, scratch, store, widen
from mpipar.kernels.native import Floats, loop, usable
from mpipar.kernels.native_math import ONE, ZERO, F
from mpipar.kernels.norm_cuda import rms_backward_cuda, rms_forward_cuda

ROWS = 32  # whose sums are taken alone


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


@loop
def forward_loop(
    x: Floats, w: Floats, y: Floats, inverse: Floats, n: int, d: int, eps: float
) -> None:
    """Write y (n, d) and r of its rows (n,)."""
    for i in range(n):
        at, square = i * d, ZERO
        for j in range(d):
            square += x[at + j] * x[at + j]
        r = ONE / np.sqrt(square / F(d) + eps)
        for j in range(d):
            y[at + j] = x[at + j] * r * w[j]
        inverse[i] = r


@loop
def backward_loop(
    g: Floats, x: Floats, w: Floats, inverse: Floats, dx: Floats, dw: Floats, part: Floats,
    n: int, d: int,
) -> None:  # fmt: skip
    """Write dx (n, d) and dw (d,); part is scratch (d,), for the sums of ROWS rows."""
    for j in range(d):
        dw[j] = ZERO
    for start in range(0, n, ROWS):
        for j in range(d):
            part[j] = ZERO
        for i in range(start, min(start + ROWS, n)):
            at, r, b = i * d, inverse[i], ZERO
            for j in range(d):
                p = g[at + j] * (x[at + j] * r)
                b += p * w[j]
                part[j] += p
            b = b / F(d)
            for j in range(d):
                dx[at + j] = r * (g[at + j] * w[j] - x[at + j] * r * b)
        for j in range(d):
            dw[j] += part[j]


def forward(x: np.ndarray, w: np.ndarray, eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """Return y (like x) and r (N,) for backward: x (..., D), w (D,)."""
    if is_device(x):
        return rms_forward_cuda(x, w, eps)
    host("rms_norm", w)
    if usable(x, w):
        n, d, y = x.size // max(x.shape[-1], 1), x.shape[-1], np.empty(x.shape, x.dtype)
        inverse = np.empty(n, x.dtype)
        forward_loop(x, w, y, inverse, n, d, eps)
        return y, inverse
    return forward_cpu(x, w, eps)


def backward(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, r: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of x and w from g, that of y."""
    if is_device(x):
        return rms_backward_cuda(g, x, w, r)
    host("rms_norm", g, w)
    if usable(g, x, w, r):
        dx, dw, part = (np.empty(s, x.dtype) for s in (x.shape, w.shape, w.shape))
        backward_loop(g, x, w, r, dx, dw, part, r.size, w.size)
        return dx, dw
    return backward_cpu(g, x, w, r)
