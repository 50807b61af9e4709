"""Softmax and its logarithm on a GPU (the formulas: kernels/softmax.py).

Forward reads a row twice: each lane keeps a running maximum and the sum of exponentials below it
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), then writes.
"""

import math

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import constant, cuda, device, kernel, narrow, widen
from mpipar.kernels.rows_cuda import (
    THREADS,
    contiguous,
    largest,
    over_rows,
    row_of,
    rows_and_columns,
    summed,
)


@device
def power(z, array):  # type: ignore[no-untyped-def]
    """Return e^z as a number of the type that elements of `array` are computed in."""
    return constant(math.exp(z), array)


@device
def peak(x, at, d, lane, lanes):  # type: ignore[no-untyped-def]
    """Return the maximum m of a lane's columns of the row at `at`, and the sum of e^(x - m)."""
    top, total = constant(-math.inf, x), constant(0, x)
    for j in range(lane, d, lanes):
        z = widen(x[at + j])
        if z > top:
            total = total * power(top - z, x) + constant(1, x)
            top = z
        elif z != -math.inf:  # e^(-inf + inf) is no number; one that is none stays so
            total += power(z - top, x)
    return top, total


@kernel("T[], T[], int32, int32, int64, int64", threads=THREADS, fast=False)
def forward(x, y, log, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write the softmax of rows, or its logarithm."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    at = row * d
    top, part = constant(-math.inf, x), constant(0, x)
    if row < n:
        top, part = peak(x, at, d, lane, lanes)
    all_top = constant(largest(mem, top, lanes), x)
    if top != all_top:
        part *= power(top - all_top, x)
    total = summed(mem, part, lanes)
    if row < n:
        share, less = constant(1 / total, x), constant(math.log(total), x) if log else all_top
        for j in range(lane, d, lanes):
            z = widen(x[at + j]) - all_top
            y[at + j] = narrow(z - less if log else power(z, x) * share, y)


@kernel("T[], T[], T[], int32, int32, int64, int64", threads=THREADS, fast=False)
def backward(g, y, dx, log, lanes, n, d):  # type: ignore[no-untyped-def]
    """Write the gradient of x from that of y, and y."""
    mem = cuda.shared.array(THREADS, "float64")
    row, lane = row_of(lanes), cuda.threadIdx.x & (lanes - 1)
    at, part = row * d, constant(0, g)
    if row < n:
        for j in range(lane, d, lanes):
            one = widen(g[at + j])
            part += one if log else one * widen(y[at + j])
    total = constant(summed(mem, part, lanes), g)
    if row < n:
        for j in range(lane, d, lanes):
            one, other = widen(g[at + j]), widen(y[at + j])
            dx[at + j] = narrow(one - power(other, g) * total if log else other * (one - total), dx)


def forward_cuda(x: Array, log: bool) -> Array:
    """Return the softmax of x (..., D) over the last dimension, or its logarithm."""
    (x,) = contiguous(x)
    y = module_of(x).empty(x.shape, x.dtype)
    over_rows(forward, *rows_and_columns(x), x, y, int(log))
    return y


def backward_cuda(g: Array, y: Array, log: bool) -> Array:
    """Return the gradient of x from that of y, and y."""
    g, y = contiguous(g, y)
    dx = module_of(y).empty(y.shape, y.dtype)
    over_rows(backward, *rows_and_columns(y), g, y, dx, int(log))
    return dx
