"""Cross-entropy on a GPU (the formulas: kernels/cross_entropy.py), whole or cut by columns.

    whole   one kernel: the row's maximum and sum in one read, then the loss, and d in a second read
    cut     maxima | all-reduce | sums below them | all-reduce | slope (parallel/tensor/vocab.py)

Exponentials of a cut row are not kept: backward reads the logits again.  Kernels whose threads are
not bounded would spill with the bound: for float64, ptxas then stops at 64 registers.
"""

import math

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.device import constant, cuda, device, kernel, widen
from mpipar.kernels.fours import put, quads, take
from mpipar.kernels.reduce_cuda import ADD, MAXIMUM, combined
from mpipar.kernels.rows_cuda import THREADS, columns, contiguous, folded, over_rows, row_of
from mpipar.kernels.softmax_cuda import below, max4, peak, power


@device
def away(four, top, v, j):  # type: ignore[no-untyped-def]
    """Return the sum of x - top of four columns from j on, of those that there are, in float64."""
    a, b, c, e = four
    sums = np.float64(a - top)
    if j + 1 < v:
        sums += np.float64(b - top)
    if j + 2 < v:
        sums += np.float64(c - top)
    if j + 3 < v:
        sums += np.float64(e - top)
    return sums


@device
def sloped(four, j, target, top, share, most, even, array):  # type: ignore[no-untyped-def]
    """Return d of four columns from j on; target: the column of the target."""
    a, b, c, e = four
    a, b = power(a - top, array) * share - even, power(b - top, array) * share - even
    c, e = power(c - top, array) * share - even, power(e - top, array) * share - even
    return (
        a - most if j == target else a,
        b - most if j + 1 == target else b,
        c - most if j + 2 == target else c,
        e - most if j + 3 == target else e,
    )


@kernel("T[], int64[], W[], T[], W, int64, int32, int32, int32, int64, int64", fast=False)
def forward(x, t, losses, d, smoothing, ignore, slope, wide, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write the loss of each row, and d if asked."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(0, x)
    first, step = columns(lanes)
    at = row * v
    top, part, plain = constant(-math.inf, x), none, np.float64(0)
    if row < n:
        top, part = peak(x, at, v, wide, lanes)
        if smoothing != 0:
            for j in range(first, v, step):
                plain += away(take(x, at + j, at + v, wide, none), none, v, j)
    all_top = folded(mem, top, lanes, MAXIMUM)
    less = constant(all_top, x)
    if top != less:
        part *= power(top - less, x)
    total = folded(mem, part, lanes, ADD)
    if smoothing != 0:
        plain = folded(mem, plain, lanes, ADD)
    if row < n:
        target = t[row]
        if first == 0:
            loss = np.float64(0)
            if target != ignore:
                loss = math.log(total) - (1 - smoothing) * (widen(x[at + target]) - all_top)
                if smoothing != 0:
                    loss -= smoothing * (plain / v - all_top)
            losses[row] = loss
        if slope:
            share, even = constant(1 / total, x), constant(smoothing / v, x)
            most = constant(1, x) - smoothing
            for j in range(first, v, step):
                four = take(x, at + j, at + v, wide, less)
                a, b, c, e = sloped(four, j, target, less, share, most, even, x)
                put(d, at + j, at + v, wide, a, b, c, e)


@kernel("W[], int64[], T[], int64, int32, int32, int64, int64", threads=THREADS, fast=False)
def backward(g, t, d, ignore, wide, lanes, n, v):  # type: ignore[no-untyped-def]
    """Multiply the rows of d by g, or by 0 where the target is to be ignored."""
    row = row_of(lanes)
    first, step = columns(lanes)
    if row < n:
        s = g[row] if t[row] != ignore else constant(0, d)
        stop = row * v + v
        for j in range(row * v + first, stop, step):
            a, b, c, e = take(d, j, stop, wide, s)
            put(d, j, stop, wide, a * s, b * s, c * s, e * s)


@kernel("T[], W[], int32, int32, int64, int64", threads=THREADS, fast=False)
def maxima(x, out, wide, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write the maximum of each row."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(-math.inf, x)
    first, step = columns(lanes)
    top = none
    if row < n:
        stop = row * v + v
        for j in range(row * v + first, stop, step):
            top = combined(top, max4(take(x, j, stop, wide, none)), MAXIMUM)
    found = folded(mem, top, lanes, MAXIMUM)
    if row < n and first == 0:
        out[row] = found


@kernel("T[], W[], int64[], W[], int32, int32, int32, int64, int64", fast=False)
def sums(x, top, column, out, smooth, wide, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write each row's sum of e^(x - top), x - top at `column` or 0, and the sum of x - top."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(-math.inf, x)
    first, step = columns(lanes)
    at, part, plain, less = row * v, constant(0, x), np.float64(0), constant(0, x)
    if row < n:
        less = top[row]
        for j in range(first, v, step):
            four = take(x, at + j, at + v, wide, none)
            part += below(four, less, x)
            plain += away(four, less, v, j)
    total = folded(mem, part, lanes, ADD)
    if smooth:
        plain = folded(mem, plain, lanes, ADD)
    if row < n and first == 0:
        out[row] = total
        j = column[row]
        out[n + row] = widen(x[at + j]) - less if j >= 0 else constant(0, x)
        if smooth:
            out[2 * n + row] = plain


@kernel("T[], W[], W[], W[], int64[], T[], W, W, int32, int32, int64, int64", fast=False)
def slope(x, top, total, scale, column, dx, most, even, wide, lanes, n, v):  # type: ignore[no-untyped-def]
    """Write scale * (e^(x - top) / total - even - most [j = column])."""
    row = row_of(lanes)
    first, step = columns(lanes)
    if row < n:
        at, share = row * v, constant(1, x) / total[row]
        less, target, s = top[row], column[row], scale[row]
        for j in range(first, v, step):
            four = take(x, at + j, at + v, wide, less)
            a, b, c, e = sloped(four, j, target, less, share, most, even, x)
            put(dx, at + j, at + v, wide, s * a, s * b, s * c, s * e)


def forward_cuda(
    x: Array, t: Array, smoothing: float, ignore: int, with_slope: bool
) -> tuple[Array, Array | None]:
    """Return the loss of each row of x (N, V), float32 or wider, and d if asked."""
    xp = module_of(x)
    x, t = contiguous(x, t.astype(np.int64, copy=False))
    losses = xp.empty(len(x), compute_dtype(x.dtype))
    d = xp.empty(x.shape if with_slope else 0, x.dtype)
    how = smoothing, ignore, with_slope, quads(x.shape[1], x, d)
    over_rows(forward, *x.shape, x, t, losses, d, *how)
    return losses, d if with_slope else None


def backward_cuda(g: Array, d: Array, t: Array, ignore: int) -> Array:
    """Return the gradient of the logits, written over d, which is contiguous."""
    g, t = contiguous(g.astype(compute_dtype(d.dtype)), t.astype(np.int64, copy=False))
    over_rows(backward, *d.shape, g, t, d, ignore, quads(d.shape[1], d))
    return d


def maxima_cuda(x: Array) -> Array:
    """Return the maximum of each row of x (N, V/p), float32 or wider: -inf of no columns."""
    (x,) = contiguous(x)
    out = module_of(x).empty(len(x), compute_dtype(x.dtype))
    over_rows(maxima, *x.shape, x, out, quads(x.shape[1], x))
    return out


def sums_cuda(x: Array, top: Array, column: Array, smoothing: float) -> Array:
    """Return what the ranks add up, (2, N), or (3, N) with smoothing.

    top: the maxima (N,) over all ranks.  column: (N,) int64, the target's among those of this rank,
    or -1.  The rows: sums of e^(x - top); x - top at the column, or 0; sums of x - top.
    """
    x, top, column = contiguous(x, top, column)
    out = module_of(x).empty((3 if smoothing else 2, len(x)), top.dtype)
    over_rows(sums, *x.shape, x, top, column, out, smoothing != 0, quads(x.shape[1], x))
    return out


def slope_cuda(
    x: Array, top: Array, total: Array, scale: Array, column: Array, smoothing: float, vocab: int
) -> Array:
    """Return the gradient of this rank's logits x (N, V/p), of their dtype.

    total: the sums of e^(x - top) over all ranks (N,).  scale: the gradient of each row's loss, 0
    where it is ignored.  vocab: V.
    """
    x, top, total, scale, column = contiguous(x, top, total, scale, column)
    dx = module_of(x).empty(x.shape, x.dtype)
    how = 1 - smoothing, smoothing / vocab, quads(x.shape[1], x, dx)
    over_rows(slope, *x.shape, x, top, total, scale, column, dx, *how)
    return dx
