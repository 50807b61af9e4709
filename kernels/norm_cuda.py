"""layer_norm and rms_norm on a GPU (the formulas: kernels/layer_norm.py and rms_norm.py).

rms_norm is layer_norm with a mean of 0 and without b, so both share these kernels: centred = 0.

    forward     lanes read a row for its mean, for its variance, and to write y
    backward    dx a row as forward; dw and db in blocks of 32 columns and some rows, then the sums
                of those blocks in the order of their rows: no atomic sums
"""

import math

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import blocks, constant, cuda, kernel, narrow, widen
from mpipar.kernels.rows_cuda import (
    DEEP,
    THREADS,
    WIDE,
    chunks_of,
    contiguous,
    over_rows,
    parts,
    row_of,
    rows_and_columns,
    summed,
    total_cuda,
)

Stats = tuple[Array, Array]  # mean and 1 / standard deviation of each row, (N,)


@kernel("T[], T[], T[], T[], W[], W[], W, int32, int32, int64, int64", threads=THREADS, fast=False)
def forward(x, w, b, y, mean, rstd, eps, centred, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write y, and the statistics of its rows."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    at, middle, part = row * d, constant(0, x), constant(0, x)
    if centred:
        if row < n:
            for j in range(lane, d, lanes):
                part += widen(x[at + j])
        middle = constant(summed(mem, part, lanes) / d, x)
    part = constant(0, x)
    if row < n:
        for j in range(lane, d, lanes):
            away = widen(x[at + j]) - middle
            part += away * away
    r = constant(1 / math.sqrt(summed(mem, part, lanes) / d + eps), x)
    if row < n:
        for j in range(lane, d, lanes):
            z = (widen(x[at + j]) - middle) * r * widen(w[j])
            y[at + j] = narrow(z + widen(b[j]) if centred else z, y)
        if lane == 0:
            rstd[row] = r
            if centred:
                mean[row] = middle


@kernel("T[], T[], T[], W[], W[], T[], int32, int32, int64, int64", threads=THREADS, fast=False)
def backward(g, x, w, mean, rstd, dx, centred, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write dx."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    at, middle, r = row * d, constant(0, x), constant(0, x)
    plain = along = constant(0, x)
    if row < n:
        r = rstd[row]
        if centred:
            middle = mean[row]
        for j in range(lane, d, lanes):
            h = widen(g[at + j]) * widen(w[j])
            plain += h
            along += h * (widen(x[at + j]) - middle) * r
    b = constant(summed(mem, along, lanes) / d, x)
    a = constant(0, x)
    if centred:
        a = constant(summed(mem, plain, lanes) / d, x)
    if row < n:
        for j in range(lane, d, lanes):
            h = widen(g[at + j]) * widen(w[j])
            dx[at + j] = narrow(r * (h - a - (widen(x[at + j]) - middle) * r * b), dx)


@kernel("T[], T[], W[], W[], W[], W[], int32, int64, int64, int64", threads=THREADS, fast=False)
def columns(g, x, mean, rstd, dw, db, centred, rows, n, d):  # type: ignore[no-untyped-def]
    """Write the sums over blocks of `rows` rows of dy * normalised x, and of dy if centred."""
    mem = cuda.shared.array(THREADS, "float64")
    other = cuda.shared.array(THREADS, "float64")
    t = cuda.threadIdx.x
    j, deep = cuda.blockIdx.x * WIDE + t % WIDE, t // WIDE
    along, plain = constant(0, x), constant(0, x)
    first = cuda.blockIdx.y * rows
    if j < d:
        for i in range(first + deep, min(first + rows, n), DEEP):
            dy, away = widen(g[i * d + j]), widen(x[i * d + j])
            if centred:
                away -= mean[i]
                plain += dy
            along += dy * away * rstd[i]
    mem[t], other[t] = along, plain
    cuda.syncthreads()
    if deep == 0 and j < d:
        w_sum, b_sum = mem[t], other[t]
        for k in range(1, DEEP):
            w_sum += mem[t + k * WIDE]
            b_sum += other[t + k * WIDE]
        dw[cuda.blockIdx.y * d + j] = w_sum
        if centred:
            db[cuda.blockIdx.y * d + j] = b_sum


def layer_forward_cuda(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Stats]:
    """Return y (like x) and the statistics of the rows: x (..., D), w and b (D,)."""
    x, w, b = contiguous(x, w, b)
    n, d = rows_and_columns(x)
    xp, wide = module_of(x), compute_dtype(x.dtype)
    y, mean, rstd = xp.empty(x.shape, x.dtype), xp.empty(n, wide), xp.empty(n, wide)
    over_rows(forward, n, d, x, w, b, y, mean, rstd, eps, 1)
    return y, (mean, rstd)


def layer_backward_cuda(g: Array, x: Array, w: Array, stats: Stats) -> tuple[Array, Array, Array]:
    """Return the gradients of x, w and b."""
    g, x, w = contiguous(g, x, w)
    n, d = rows_and_columns(x)
    dx, (dw, db) = module_of(x).empty(x.shape, x.dtype), parts(2, n, d, x)
    over_rows(backward, n, d, g, x, w, *stats, dx, 1)
    count, rows = chunks_of(n)
    columns((blocks(d, WIDE), count), THREADS, g, x, *stats, dw, db, 1, rows, n, d)
    return dx, total_cuda(dw, w), total_cuda(db, w)


def rms_forward_cuda(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """Return y (like x) and 1 / root mean square of each row: x (..., D), w (D,)."""
    x, w = contiguous(x, w)
    n, d = rows_and_columns(x)
    xp = module_of(x)
    y, r = xp.empty(x.shape, x.dtype), xp.empty(n, compute_dtype(x.dtype))
    over_rows(forward, n, d, x, w, w[:0], y, r[:0], r, eps, 0)
    return y, r


def rms_backward_cuda(g: Array, x: Array, w: Array, r: Array) -> tuple[Array, Array]:
    """Return the gradients of x and w."""
    g, x, w = contiguous(g, x, w)
    n, d = rows_and_columns(x)
    dx, (dw,) = module_of(x).empty(x.shape, x.dtype), parts(1, n, d, x)
    over_rows(backward, n, d, g, x, w, r[:0], r, dx, 0)
    count, rows = chunks_of(n)
    columns((blocks(d, WIDE), count), THREADS, g, x, r[:0], r, dw, dw[0, :0], 0, rows, n, d)
    return dx, total_cuda(dw, w)
