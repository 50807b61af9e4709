"""The optimisers' updates on a GPU (formulas: kernels/adamw.py, kernels/sgd.py), in place.

Moments and sums are float32, or float64 of float64 parameters.
"""

import math

from mpipar.arrays import Array
from mpipar.kernels.device import FOUR, THREADS, cuda, elementwise, kernel, narrow, widen


@kernel("T[], T[], W[], W[], W, W, W, W, W, W, W, W, int64", threads=THREADS)
def adamw(w, grad, m, v, beta1, beta2, share1, share2, rate, small, keep, scale, n):  # type: ignore[no-untyped-def]
    """Update w, m and v; share = 1 - beta, keep = 1 - lr decay."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            g = widen(grad[i]) * scale
            mean = beta1 * m[i] + share1 * g
            square = beta2 * v[i] + share2 * g * g
            m[i], v[i] = mean, square
            w[i] = narrow(keep * widen(w[i]) - rate * mean / (math.sqrt(square) + small), w)


@kernel("T[], T[], W[], W, W, W, W, int32, int64", threads=THREADS)
def sgd(w, grad, buffer, lr, momentum, decay, scale, has_buffer, n):  # type: ignore[no-untyped-def]
    """Update w, and the buffer of momentum if there is one."""
    first = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = first + k * THREADS
        if i < n:
            old = widen(w[i])
            b = widen(grad[i]) * scale + decay * old
            if has_buffer:
                b += momentum * buffer[i]
                buffer[i] = b
            w[i] = narrow(old - lr * b, w)


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
