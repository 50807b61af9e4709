"""Cross-entropy on a GPU (the formulas: kernels/cross_entropy.py), whole or cut by columns.

    whole   one kernel: the row's maximum and sum in one read, then the loss, and d in a second read
    cut     maxima | all-reduce | sums below them | all-reduce | slope (mpipar/parallel/vocab.py)

Exponentials of a cut row are not kept: backward reads the logits again.
"""

import math

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import constant, cuda, kernel, narrow, widen
from mpipar.kernels.rows_cuda import THREADS, contiguous, largest, over_rows, row_of, summed
from mpipar.kernels.softmax_cuda import peak, power


@kernel("T[], int64[], W[], T[], W, int64, int32, int32, int64, int64", threads=THREADS, fast=False)
def forward(x, t, losses, d, smoothing, ignore, slope, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write the loss of each row, and d if asked."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    at = row * v
    top, part, plain = constant(-math.inf, x), constant(0, x), np.float64(0)
    if row < n:
        top, part = peak(x, at, v, lane, lanes)
        if smoothing != 0:
            for j in range(lane, v, lanes):
                plain += np.float64(widen(x[at + j]))
    all_top = largest(mem, top, lanes)
    less = constant(all_top, x)
    if top != less:
        part *= power(top - less, x)
    total = summed(mem, part, lanes)
    if smoothing != 0:
        plain = summed(mem, plain, lanes)
    if row < n:
        target = t[row]
        if lane == 0:
            loss = np.float64(0)
            if target != ignore:
                loss = math.log(total) - (1 - smoothing) * (widen(x[at + target]) - all_top)
                if smoothing != 0:
                    loss -= smoothing * (plain / v - all_top)
            losses[row] = loss
        if slope:
            share, even = constant(1 / total, x), constant(smoothing / v, x)
            most = constant(1, x) - smoothing
            for j in range(lane, v, lanes):
                p = power(widen(x[at + j]) - less, x) * share - even
                d[at + j] = narrow(p - most if j == target else p, d)


@kernel("W[], int64[], T[], int64, int32, int64, int64", threads=THREADS, fast=False)
def backward(g, t, d, ignore, lanes, n, v):  # type: ignore[no-untyped-def]
    """Multiply the rows of d by g, or by 0 where the target is to be ignored."""
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    if row < n:
        scale = g[row] if t[row] != ignore else constant(0, d)
        for j in range(lane, v, lanes):
            d[row * v + j] = narrow(widen(d[row * v + j]) * scale, d)


@kernel("T[], W[], int32, int64, int64", threads=THREADS, fast=False)
def maxima(x, out, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write the maximum of each row."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    top = constant(-math.inf, x)
    if row < n:
        for j in range(lane, v, lanes):
            z = widen(x[row * v + j])
            top = top if top >= z or top != top else z  # not a number: the maximum is none
    found = largest(mem, top, lanes)
    if row < n and lane == 0:
        out[row] = found


@kernel("T[], W[], int64[], W[], int32, int32, int64, int64", threads=THREADS, fast=False)
def sums(x, top, column, out, smooth, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write each row's sum of e^(x - top), x - top at `column` or 0, and the sum of x - top."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    part, plain, less = constant(0, x), np.float64(0), constant(0, x)
    if row < n:
        less = top[row]
        for j in range(lane, v, lanes):
            z = widen(x[row * v + j]) - less
            part += power(z, x)
            plain += np.float64(z)
    total = summed(mem, part, lanes)
    if smooth:
        plain = summed(mem, plain, lanes)
    if row < n and lane == 0:
        out[row] = total
        j = column[row]
        out[n + row] = widen(x[row * v + j]) - less if j >= 0 else constant(0, x)
        if smooth:
            out[2 * n + row] = plain


@kernel("T[], W[], W[], W[], int64[], T[], W, W, int32, int64, int64", threads=THREADS, fast=False)
def slope(x, top, total, scale, column, dx, most, even, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write scale * (e^(x - top) / total - even - most [j = column])."""
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    if row < n:
        share = constant(1, x) / total[row]
        less, target, factor = top[row], column[row], scale[row]
        for j in range(lane, v, lanes):
            p = power(widen(x[row * v + j]) - less, x) * share - even
            dx[row * v + j] = narrow(factor * (p - most if j == target else p), dx)


def forward_cuda(
    x: Array, t: Array, smoothing: float, ignore: int, with_slope: bool
) -> tuple[Array, Array | None]:
    """Return the loss of each row of x (N, V), float32 or wider, and d if asked."""
    xp = module_of(x)
    x, t = contiguous(x, t.astype(np.int64, copy=False))
    losses = xp.empty(len(x), compute_dtype(x.dtype))
    d = xp.empty(x.shape if with_slope else 0, x.dtype)
    over_rows(forward, *x.shape, x, t, losses, d, smoothing, ignore, int(with_slope))
    return losses, d if with_slope else None


def backward_cuda(g: Array, d: Array, t: Array, ignore: int) -> Array:
    """Return the gradient of the logits, written over d, which is contiguous."""
    g, t = contiguous(g.astype(compute_dtype(d.dtype)), t.astype(np.int64, copy=False))
    over_rows(backward, *d.shape, g, t, d, ignore)
    return d


def maxima_cuda(x: Array) -> Array:
    """Return the maximum of each row of x (N, V/p), float32 or wider: -inf of no columns."""
    (x,) = contiguous(x)
    out = module_of(x).empty(len(x), compute_dtype(x.dtype))
    over_rows(maxima, *x.shape, x, out)
    return out


def sums_cuda(x: Array, top: Array, column: Array, smoothing: float) -> Array:
    """Return what the ranks add up, (2, N), or (3, N) with smoothing.

    top: the maxima (N,) over all ranks.  column: (N,) int64, the target's among those of this rank,
    or -1.  The rows: sums of e^(x - top); x - top at the column, or 0; sums of x - top.
    """
    x, top, column = contiguous(x, top, column)
    out = module_of(x).empty((3 if smoothing else 2, len(x)), top.dtype)
    over_rows(sums, *x.shape, x, top, column, out, int(smoothing != 0))
    return out


def slope_cuda(
    x: Array, top: Array, total: Array, scale: Array, column: Array, smoothing: float, vocab: int
) -> Array:
    """Return the gradient of this rank's logits x (N, V/p), of their dtype.

    total: the sums of e^(x - top) over all ranks (N,).  scale: the gradient of each row's loss, 0
    where it is ignored.  vocab: V.
    """
    x, top, total, scale, column = contiguous(x, top, total, scale, column)
    dx, how = module_of(x).empty(x.shape, x.dtype), (1 - smoothing, smoothing / vocab)
    over_rows(slope, *x.shape, x, top, total, scale, column, dx, *how)
    return dx
