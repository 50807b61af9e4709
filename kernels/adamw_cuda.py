"""The optimisers' updates on a GPU (formulas: kernels/adamw.py, kernels/sgd.py), in place.

Moments and sums are float32, or float64 of float64 parameters.
"""

import math

from mpipar.arrays import Array
from mpipar.kernels.device import THREADS, constant, device, kernel
from mpipar.kernels.fours import elementwise, mine, put, take


@device
def stepped(w, g, m, v, beta1, beta2, share1, share2, rate, small, keep):  # type: ignore[no-untyped-def]
    """Return w, m and v after a step of AdamW."""
    mean = beta1 * m + share1 * g
    square = beta2 * v + share2 * g * g
    return keep * w - rate * mean / (math.sqrt(square) + small), mean, square


@kernel("T[], T[], W[], W[], W, W, W, W, W, W, W, W, int32, int64", threads=THREADS)
def adamw(w, grad, m, v, beta1, beta2, share1, share2, rate, small, keep, scale, wide, n):  # type: ignore[no-untyped-def]
    """Update w, m and v; share = 1 - beta, keep = 1 - lr decay."""
    i, none = mine(), constant(0, w)
    a, b, c, d = take(w, i, n, wide, none)
    e, f, g, h = take(grad, i, n, wide, none)
    m0, m1, m2, m3 = take(m, i, n, wide, none)
    v0, v1, v2, v3 = take(v, i, n, wide, none)
    a, m0, v0 = stepped(a, e * scale, m0, v0, beta1, beta2, share1, share2, rate, small, keep)
    b, m1, v1 = stepped(b, f * scale, m1, v1, beta1, beta2, share1, share2, rate, small, keep)
    c, m2, v2 = stepped(c, g * scale, m2, v2, beta1, beta2, share1, share2, rate, small, keep)
    d, m3, v3 = stepped(d, h * scale, m3, v3, beta1, beta2, share1, share2, rate, small, keep)
    put(m, i, n, wide, m0, m1, m2, m3)
    put(v, i, n, wide, v0, v1, v2, v3)
    put(w, i, n, wide, a, b, c, d)


@kernel("T[], T[], W[], W, W, W, W, int32, int32, int64", threads=THREADS)
def sgd(w, grad, buffer, lr, momentum, decay, scale, has_buffer, wide, n):  # type: ignore[no-untyped-def]
    """Update w, and the buffer of momentum if there is one."""
    i, none = mine(), constant(0, w)
    a, b, c, d = take(w, i, n, wide, none)
    e, f, g, h = take(grad, i, n, wide, none)
    e, f = e * scale + decay * a, f * scale + decay * b
    g, h = g * scale + decay * c, h * scale + decay * d
    if has_buffer:
        p, q, r, s = take(buffer, i, n, wide, none)
        e, f, g, h = e + momentum * p, f + momentum * q, g + momentum * r, h + momentum * s
        put(buffer, i, n, wide, e, f, g, h)
    put(w, i, n, wide, a - lr * e, b - lr * f, c - lr * g, d - lr * h)


def adamw_step_cuda(
    param: Array, grad: Array, m: Array, v: Array,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float,
) -> None:  # fmt: skip
    """Update param, m and v in place."""
    root = math.sqrt(1 - beta2**step)
    rate, keep = lr * root / (1 - beta1**step), 1 - lr * weight_decay
    numbers = (beta1, beta2, 1 - beta1, 1 - beta2, rate, eps * root, keep, grad_scale)
    elementwise(adamw, param, grad, m, v, *numbers)


def sgd_step_cuda(
    param: Array, grad: Array, buffer: Array | None,
    lr: float, momentum: float, weight_decay: float, grad_scale: float,
) -> None:  # fmt: skip
    """Update param and buffer in place; without a buffer none is read or written."""
    none = buffer is None
    some = param.reshape(-1)[:0].astype(sgd.kinds(param.dtype.name)[2].removesuffix("[]"))
    kept = some if buffer is None else buffer
    elementwise(sgd, param, grad, kept, lr, momentum, weight_decay, grad_scale, int(not none))
