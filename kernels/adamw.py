"""m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m^ / (sqrt(v^) + eps) + decay w).

Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).  m^ = m / (1 - b1^step) and
v^ = v / (1 - b2^step); g is the gradient times grad_scale (the factor of clipping).  All in place.

Cost on the CPU: one pass; w, m and v are read and written once, g is read once.
"""

import math

import numpy as np

from mpipar.arrays import is_device
from mpipar.kernels.adamw_cuda import adamw_step_cuda
from mpipar.kernels.blocks import BLOCK_BYTES, flat, host
from mpipar.kernels.native import Floats, loop, usable

STEP = BLOCK_BYTES // 16  # elements: w, g, m, v and two of scratch stay in the cache


def reference(
    param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the new param, m and v in float64."""
    w, g, m, v = (a.astype(np.float64) for a in (param, grad, m, v))
    g = g * grad_scale
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return w - lr * (update + weight_decay * w), m, v


def adamw_step_cpu(
    param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float,
) -> None:  # fmt: skip
    """Update flat arrays block by block.  lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps) is written
    with the corrections drawn out: rate * m / (sqrt(v) + eps'), rate = lr sqrt(1-b2^t)/(1-b1^t).
    """
    root = math.sqrt(1 - beta2**step)
    rate, small = lr * root / (1 - beta1**step), eps * root
    space = np.empty((2, min(STEP, param.size)), m.dtype)
    for start in range(0, param.size, STEP):
        part = slice(start, min(start + STEP, param.size))
        w, g, mean, square = param[part], grad[part], m[part], v[part]
        a, b = space[:, : len(w)]
        np.multiply(g, grad_scale * (1 - beta1), out=a, casting="same_kind", dtype=a.dtype)
        mean *= beta1
        mean += a
        np.multiply(a, a, out=b)
        b *= (1 - beta2) / (1 - beta1) ** 2
        square *= beta2
        square += b
        np.sqrt(square, out=b)
        b += small
        np.divide(mean, b, out=b)
        b *= -rate
        if weight_decay:
            w = np.multiply(w, 1 - lr * weight_decay, out=a, dtype=a.dtype)
        np.add(w, b, out=param[part], casting="same_kind", dtype=b.dtype)


@loop
def adamw_loop(
    w: Floats, grad: Floats, m: Floats, v: Floats, n: int, beta1: float, beta2: float,
    share1: float, share2: float, rate: float, small: float, keep: float, grad_scale: float,
) -> None:  # fmt: skip
    """Update w, m and v; share = 1 - beta, keep = 1 - lr decay, rate and small as above."""
    for i in range(n):
        g = grad[i] * grad_scale
        mean = beta1 * m[i] + share1 * g
        square = beta2 * v[i] + share2 * g * g
        m[i], v[i] = mean, square
        w[i] = keep * w[i] - rate * mean / (np.sqrt(square) + small)


def adamw_step(
    param: np.ndarray, grad: np.ndarray, m: np.ndarray, v: np.ndarray,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float = 1.0,
) -> None:  # fmt: skip
    """Update param, m and v in place; the four arrays have one shape.

    m, v: float32 or wider, also for a 16-bit param.  step: counts from 1.
    Raises BufferMismatchError if one of them is not contiguous.
    """
    if is_device(param):
        adamw_step_cuda(
            flat("param", param), grad.reshape(-1), flat("m", m), flat("v", v),
            lr, beta1, beta2, eps, weight_decay, step, grad_scale,
        )  # fmt: skip
        return
    host("adamw", grad, m, v)
    if usable(param, grad, m, v):
        root = math.sqrt(1 - beta2**step)
        adamw_loop(
            param, grad, m, v, param.size, beta1, beta2, 1 - beta1, 1 - beta2,
            lr * root / (1 - beta1**step), eps * root, 1 - lr * weight_decay, grad_scale,
        )  # fmt: skip
        return
    adamw_step_cpu(
        flat("param", param), grad.reshape(-1), flat("m", m), flat("v", v),
        lr, beta1, beta2, eps, weight_decay, step, grad_scale,
    )  # fmt: skip
