"""b = momentum b + g + decay w,  w -= lr b  (w -= lr (g + decay w) without momentum).

Stochastic gradient descent as PyTorch's; g is the gradient times grad_scale.  All in place.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.adamw import STEP
from mpipar.kernels.adamw_cuda import sgd_step_cuda
from mpipar.kernels.blocks import flat, host


def reference(
    param: np.ndarray, grad: np.ndarray, buffer: np.ndarray | None,
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, grad_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the new param and buffer in float64."""
    w = param.astype(np.float64)
    b = grad.astype(np.float64) * grad_scale + weight_decay * w
    if buffer is not None:
        b = b + momentum * buffer.astype(np.float64)
    return w - lr * b, b


def sgd_step_cpu(
    param: np.ndarray, grad: np.ndarray, buffer: np.ndarray | None,
    lr: float, momentum: float, weight_decay: float, grad_scale: float,
) -> None:  # fmt: skip
    """Update flat arrays block by block."""
    wide = compute_dtype(param.dtype) if buffer is None else buffer.dtype
    space = np.empty((2, min(STEP, param.size)), wide)
    for start in range(0, param.size, STEP):
        part = slice(start, min(start + STEP, param.size))
        w, (a, b) = param[part], space[:, : min(STEP, param.size - start)]
        np.multiply(grad[part], grad_scale, out=b, casting="same_kind", dtype=wide)
        if weight_decay:
            b += np.multiply(w, weight_decay, out=a, casting="same_kind", dtype=wide)
        if buffer is not None:
            buffer[part] *= momentum
            buffer[part] += b
            b[:] = buffer[part]
        b *= -lr
        np.add(w, b, out=w, casting="same_kind", dtype=wide)


def sgd_step(
    param: np.ndarray, grad: np.ndarray, buffer: np.ndarray | None,
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, grad_scale: float = 1.0,
) -> None:  # fmt: skip
    """Update param and buffer in place; arrays of one shape.

    buffer: the momentum, float32 or wider, zeros at first; None without momentum.
    Raises BufferMismatchError if one of them is not contiguous.
    """
    velocity = None if buffer is None else flat("buffer", buffer)
    if is_device(param):
        update = sgd_step_cuda
    else:
        host("sgd", grad)
        update = sgd_step_cpu
    update(flat("param", param), grad.reshape(-1), velocity, lr, momentum, weight_decay, grad_scale)
