"""layer_norm and rms_norm on a GPU (the formulas: kernels/layer_norm.py and rms_norm.py).

rms_norm is layer_norm with a mean of 0 and without b, so both share these kernels: centred = 0.

    forward     lanes read a row for its mean, for its variance, and to write y
    backward    dx a row as forward; dw and db in blocks of 32 columns and some rows, then the sums
                of those blocks in the order of their rows: no atomic sums
"""

import math

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import blocks, constant, cuda, device, kernel, widen
from mpipar.kernels.fours import put, quads, take
from mpipar.kernels.reduce_cuda import ADD
from mpipar.kernels.rows_cuda import (
    DEEP,
    THREADS,
    WIDE,
    add4,
    chunks_of,
    columns,
    contiguous,
    folded,
    over_rows,
    parts,
    row_of,
    rows_and_columns,
    total_cuda,
)

Stats = tuple[Array, Array]  # mean and 1 / standard deviation of each row, (N,)


@device
def squares(four, middle, d, j):  # type: ignore[no-untyped-def]
    """Return the sum of (x - middle)^2 of four columns from j on, of those that there are."""
    a, b, c, e = four
    a, b, c, e = a - middle, b - middle, c - middle, e - middle
    sums = a * a
    if j + 1 < d:
        sums += b * b
    if j + 2 < d:
        sums += c * c
    if j + 3 < d:
        sums += e * e
    return sums


# without a bound of threads: with it, ptxas stops at 40 registers for bfloat16, and spills
@kernel("T[], T[], T[], T[], W[], W[], W, int32, int32, int32, int64, int64", fast=False)
def forward(x, w, b, y, mean, rstd, eps, centred, wide, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write y, and the statistics of its rows."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(0, x)
    first, step = columns(lanes)
    at, stop, middle, part = row * d, row * d + d, none, none
    if centred:
        if row < n:
            for j in range(first, d, step):
                part += add4(take(x, at + j, stop, wide, none))
        middle = constant(folded(mem, part, lanes, ADD) / d, x)
    part = none
    if row < n:
        for j in range(first, d, step):
            part += squares(take(x, at + j, stop, wide, none), middle, d, j)
    r = constant(1 / math.sqrt(folded(mem, part, lanes, ADD) / d + eps), x)
    if row < n:
        for j in range(first, d, step):
            a, e, f, g = take(x, at + j, stop, wide, none)
            p, q, s, t = take(w, j, d, wide, none)
            a, e, f, g = a - middle, e - middle, f - middle, g - middle
            a, e, f, g = a * r * p, e * r * q, f * r * s, g * r * t
            if centred:
                p, q, s, t = take(b, j, d, wide, none)
                a, e, f, g = a + p, e + q, f + s, g + t
            put(y, at + j, stop, wide, a, e, f, g)
        if first == 0:
            rstd[row] = r
            if centred:
                mean[row] = middle


@kernel(
    "T[], T[], T[], W[], W[], T[], int32, int32, int32, int64, int64", threads=THREADS, fast=False
)
def backward(g, x, w, mean, rstd, dx, centred, wide, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write dx."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(0, x)
    first, step = columns(lanes)
    at, stop, middle, r = row * d, row * d + d, none, none
    plain = along = none
    if row < n:
        r = rstd[row]
        if centred:
            middle = mean[row]
        for j in range(first, d, step):
            h, i, k, m = take(g, at + j, stop, wide, none)
            p, q, s, t = take(w, j, d, wide, none)
            h, i, k, m = h * p, i * q, k * s, m * t
            p, q, s, t = take(x, at + j, stop, wide, none)
            p, q, s, t = (p - middle) * r, (q - middle) * r, (s - middle) * r, (t - middle) * r
            plain += (h + i) + (k + m)
            along += (h * p + i * q) + (k * s + m * t)
    b = constant(folded(mem, along, lanes, ADD) / d, x)
    a = none
    if centred:
        a = constant(folded(mem, plain, lanes, ADD) / d, x)
    if row < n:
        for j in range(first, d, step):
            h, i, k, m = take(g, at + j, stop, wide, none)
            p, q, s, t = take(w, j, d, wide, none)
            h, i, k, m = h * p - a, i * q - a, k * s - a, m * t - a
            p, q, s, t = take(x, at + j, stop, wide, none)
            p, q, s, t = (p - middle) * r, (q - middle) * r, (s - middle) * r, (t - middle) * r
            h, i, k, m = r * (h - p * b), r * (i - q * b), r * (k - s * b), r * (m - t * b)
            put(dx, at + j, stop, wide, h, i, k, m)


@kernel("T[], T[], W[], W[], W[], W[], int32, int64, int64, int64", threads=THREADS, fast=False)
def down(g, x, mean, rstd, dw, db, centred, rows, n, d):  # type: ignore[no-untyped-def]
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
    over_rows(forward, n, d, x, w, b, y, mean, rstd, eps, 1, quads(d, x, w, b, y))
    return y, (mean, rstd)


def layer_backward_cuda(g: Array, x: Array, w: Array, stats: Stats) -> tuple[Array, Array, Array]:
    """Return the gradients of x, w and b."""
    g, x, w = contiguous(g, x, w)
    n, d = rows_and_columns(x)
    dx, (dw, db) = module_of(x).empty(x.shape, x.dtype), parts(2, n, d, x)
    over_rows(backward, n, d, g, x, w, *stats, dx, 1, quads(d, g, x, w, dx))
    count, rows = chunks_of(n)
    down((blocks(d, WIDE), count), THREADS, g, x, *stats, dw, db, 1, rows, n, d)
    return dx, total_cuda(dw, w), total_cuda(db, w)


def rms_forward_cuda(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """Return y (like x) and 1 / root mean square of each row: x (..., D), w (D,)."""
    x, w = contiguous(x, w)
    n, d = rows_and_columns(x)
    xp = module_of(x)
    y, r = xp.empty(x.shape, x.dtype), xp.empty(n, compute_dtype(x.dtype))
    over_rows(forward, n, d, x, w, w[:0], y, r[:0], r, eps, 0, quads(d, x, w, y))
    return y, r


def rms_backward_cuda(g: Array, x: Array, w: Array, r: Array) -> tuple[Array, Array]:
    """Return the gradients of x and w."""
    g, x, w = contiguous(g, x, w)
    n, d = rows_and_columns(x)
    dx, (dw,) = module_of(x).empty(x.shape, x.dtype), parts(1, n, d, x)
    over_rows(backward, n, d, g, x, w, r[:0], r, dx, 0, quads(d, g, x, w, dx))
    count, rows = chunks_of(n)
    down((blocks(d, WIDE), count), THREADS, g, x, r[:0], r, dw, dw[0, :0], 0, rows, n, d)
    return dx, total_cuda(dw, w)
