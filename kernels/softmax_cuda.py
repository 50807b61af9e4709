"""Softmax and its logarithm on a GPU (the formulas: kernels/softmax.py).

Forward reads a row twice: each lane keeps a running maximum and the sum of exponentials below it
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), then writes.
"""

import math

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import constant, cuda, device, kernel
from mpipar.kernels.fours import put, quads, take
from mpipar.kernels.reduce_cuda import ADD, MAXIMUM, combined
from mpipar.kernels.rows_cuda import (
    THREADS,
    columns,
    contiguous,
    folded,
    over_rows,
    row_of,
    rows_and_columns,
)


@device
def power(z, array):  # type: ignore[no-untyped-def]
    """Return e^z as a number of the type that elements of `array` are computed in."""
    return constant(math.exp(z), array)


@device
def max4(four):  # type: ignore[no-untyped-def]
    """Return the largest of four numbers."""
    a, b, c, d = four
    return combined(combined(a, b, MAXIMUM), combined(c, d, MAXIMUM), MAXIMUM)


@device
def below(four, top, array):  # type: ignore[no-untyped-def]
    """Return the sum of e^(z - top) of four numbers z."""
    a, b, c, d = four
    sums = power(a - top, array) + power(b - top, array)
    return sums + (power(c - top, array) + power(d - top, array))


@device
def peak(x, at, d, wide, lanes):  # type: ignore[no-untyped-def]
    """Return the maximum m of a lane's columns of the row at `at`, and the sum of e^(x - m)."""
    none = constant(-math.inf, x)
    top, total = none, constant(0, x)
    first, step = columns(lanes)
    for j in range(first, d, step):
        four = take(x, at + j, at + d, wide, none)
        new = max4(four)
        if new > top or new != new:  # not a number: the maximum is none
            total *= power(top - new, x)
            top = new
        if top != none:  # e^(-inf + inf) is no number
            total += below(four, top, x)
    return top, total


@device
def shared(z, less, share, log, array):  # type: ignore[no-untyped-def]
    """Return softmax at z below the maximum, or its logarithm."""
    return z - less if log else power(z, array) * share


@kernel("T[], T[], int32, int32, int32, int64, int64", threads=THREADS, fast=False)
def forward(x, y, log, wide, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write the softmax of rows, or its logarithm."""
    mem = cuda.shared.array(THREADS, "float64")
    row = row_of(lanes)
    at = row * d
    top, part = constant(-math.inf, x), constant(0, x)
    if row < n:
        top, part = peak(x, at, d, wide, lanes)
    most = constant(folded(mem, top, lanes, MAXIMUM), x)
    if top != most:
        part *= power(top - most, x)
    total = folded(mem, part, lanes, ADD)
    if row < n:
        s, less = constant(1 / total, x), constant(math.log(total), x) if log else most
        first, step = columns(lanes)
        for j in range(first, d, step):
            a, b, c, e = take(x, at + j, at + d, wide, most)
            a, b = shared(a - most, less, s, log, x), shared(b - most, less, s, log, x)
            c, e = shared(c - most, less, s, log, x), shared(e - most, less, s, log, x)
            put(y, at + j, at + d, wide, a, b, c, e)


@device
def weighed(g, y, log):  # type: ignore[no-untyped-def]
    """Return what a column adds to the sum of its row."""
    return g if log else g * y


@device
def turned(g, y, total, log, array):  # type: ignore[no-untyped-def]
    """Return the gradient of a column."""
    return g - power(y, array) * total if log else y * (g - total)


@kernel("T[], T[], T[], int32, int32, int32, int64, int64", threads=THREADS, fast=False)
def backward(g, y, dx, log, wide, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write the gradient of x from that of y, and y."""
    mem = cuda.shared.array(THREADS, "float64")
    row, none = row_of(lanes), constant(0, g)
    first, step = columns(lanes)
    at, stop, part = row * d, row * d + d, none
    if row < n:
        for j in range(first, d, step):
            a, b, c, e = take(g, at + j, stop, wide, none)
            p, q, r, s = take(y, at + j, stop, wide, none)
            part += weighed(a, p, log) + weighed(b, q, log) + weighed(c, r, log)
            part += weighed(e, s, log)
    t = constant(folded(mem, part, lanes, ADD), g)
    if row < n:
        for j in range(first, d, step):
            a, b, c, e = take(g, at + j, stop, wide, none)
            p, q, r, s = take(y, at + j, stop, wide, none)
            a, b = turned(a, p, t, log, g), turned(b, q, t, log, g)
            c, e = turned(c, r, t, log, g), turned(e, s, t, log, g)
            put(dx, at + j, stop, wide, a, b, c, e)


def forward_cuda(x: Array, log: bool) -> Array:
    """Return the softmax of x (..., D) over the last dimension, or its logarithm."""
    (x,) = contiguous(x)
    y = module_of(x).empty(x.shape, x.dtype)
    over_rows(forward, *rows_and_columns(x), x, y, log, quads(x.shape[-1], x, y))
    return y


def backward_cuda(g: Array, y: Array, log: bool) -> Array:
    """Return the gradient of x from that of y, and y."""
    g, y = contiguous(g, y)
    dx = module_of(y).empty(y.shape, y.dtype)
    over_rows(backward, *rows_and_columns(y), g, y, dx, log, quads(y.shape[-1], g, y, dx))
    return dx
