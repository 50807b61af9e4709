"""loss_n = (1 - e) * (L_n - x_{n,t_n}) + e * (L_n - mean_v x_{n,v}),  L_n = log sum_v exp x_{n,v}.

Softmax and negative log-likelihood in one pass over the logits, with label smoothing e (Szegedy et
al. 2016, as in PyTorch).  Rows whose target is `ignore` count nothing.  Backward:

    dx_{n,v} = g_n * d_{n,v},  d_{n,v} = softmax(x)_{n,v} - (1 - e) [v = t_n] - e / V

Forward leaves d for backward, which multiplies it in place.  (In 16 bits d is rounded once; the
softmax itself, rounded, would lose the small differences from 1 that remain of a learned target.)
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.errors import ConfigError, explain
from mpipar.kernels.blocks import (
    host,
    matrix,
    place,
    row_blocks,
    row_max,
    row_sums,
    scratch,
    store,
    widen,
)
from mpipar.kernels.cross_entropy_cuda import backward_cuda, forward_cuda
from mpipar.kernels.native import Floats, Ints, loop, usable
from mpipar.kernels.native_math import ONE, ZERO, F, exp, largest


def reference(
    x: np.ndarray, t: np.ndarray, smoothing: float = 0.0, ignore: int = -100
) -> np.ndarray:
    """Return the loss of each row in float64: x (N, V), t (N,) -> (N,)."""
    z = x.astype(np.float64)
    z = z - z.max(-1, keepdims=True)
    z -= np.log(np.exp(z).sum(-1, keepdims=True))
    valid = t != ignore
    nll = -z[np.arange(len(t)), np.where(valid, t, 0)]
    return np.where(valid, (1 - smoothing) * nll - smoothing * z.mean(-1), 0.0)


def forward_cpu(
    x: np.ndarray, t: np.ndarray, smoothing: float, ignore: int, slope: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the loss of each row, and d if asked."""
    n, v = x.shape
    wide = compute_dtype(x.dtype)
    losses = np.empty(n, wide)
    d = np.empty((n, v), x.dtype) if slope else None
    space = scratch(n, v, wide)
    valid = t != ignore
    target = np.where(valid, t, 0)
    for block in row_blocks(n, v, wide.itemsize):
        part = widen(x[block])
        y = space[: len(part)] if d is None else place(d, block, space)
        at = np.arange(len(y)), target[block]
        np.subtract(part, row_max(part), out=y)
        picked = y[at]
        average = row_sums(y) / v if smoothing else 0.0
        np.exp(y, out=y)
        total = row_sums(y)
        losses[block] = np.log(total) - (1 - smoothing) * picked - smoothing * average
        if d is not None:
            y *= (1 / total)[:, None]
            y[at] -= 1 - smoothing
            if smoothing:
                y -= smoothing / v
            store(d, block, y)
    losses *= valid
    return losses, d


def backward_cpu(g: np.ndarray, d: np.ndarray, t: np.ndarray, ignore: int) -> np.ndarray:
    """Return the gradient of the logits, written over d."""
    scale = (g * (t != ignore)).astype(compute_dtype(d.dtype))
    return np.multiply(d, scale[:, None], out=d, casting="same_kind")


@loop
def forward_loop(
    x: Floats, t: Ints, total: Floats, picked: Floats, average: Floats, d: Floats, n: int, v: int,
    smoothing: float,
) -> None:  # fmt: skip
    """Write d (n, v), and of each row: sum of e^(x - max), x_t - max, and the mean of x - max."""
    for i in range(n):
        at, top, both, plain = i * v, largest(x, i * v, i * v + v), ZERO, ZERO
        for j in range(v):
            e = exp(x[at + j] - top)
            d[at + j] = e
            both += e
            plain += x[at + j] - top
        target, share, even = t[i], ONE / both, smoothing / F(v)
        total[i], picked[i], average[i] = both, x[at + target] - top, plain / F(v)
        for j in range(v):
            d[at + j] = d[at + j] * share - even
        d[at + target] -= ONE - smoothing


@loop
def backward_loop(scale: Floats, d: Floats, n: int, v: int) -> None:
    """Multiply the rows of d (n, v)."""
    for i in range(n):
        for j in range(v):
            d[i * v + j] *= scale[i]


def forward_native(
    x: np.ndarray, t: np.ndarray, smoothing: float, ignore: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each row, and d."""
    n, v = x.shape
    total, picked, average = np.empty((3, n), x.dtype)
    d, valid = np.empty((n, v), x.dtype), t != ignore
    target = np.where(valid, t, 0).astype(np.int64)
    forward_loop(x, target, total, picked, average, d, n, v, smoothing)
    losses = np.log(total) - (1 - smoothing) * picked
    if smoothing:
        losses -= smoothing * average
    losses *= valid
    return losses, d


def check(t: np.ndarray, v: int, ignore: int) -> None:
    """Raise ConfigError naming the first target (N,) outside 0..v-1 that is not `ignore`."""
    bad = (t != ignore) & ((t < 0) | (t >= v))
    if bad.any():
        first = int(bad.argmax())
        rule = f"a target is between 0 and {v - 1}, or ignore_index={ignore}"
        raise ConfigError(explain(f"targets[{first}]", int(t[first]), rule, "Check the vocabulary"))


def forward(
    x: np.ndarray,
    t: np.ndarray,
    smoothing: float = 0.0,
    ignore: int = -100,
    slope: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the loss of each row (N,), float32 or wider, and d (N, V) if asked.

    x: logits (N, V).  t: integer targets (N,).
    Raises ConfigError as `check` does; on a GPU the caller has checked them, best where they come
    from: a look at the device's would wait for it.
    """
    if is_device(x):
        return forward_cuda(x, t, smoothing, ignore, slope)
    host("cross_entropy", t)
    check(t, x.shape[1], ignore)
    if slope and usable(x):
        return forward_native(x, t, smoothing, ignore)
    return forward_cpu(matrix(x), t, smoothing, ignore, slope)


def backward(g: np.ndarray, d: np.ndarray, t: np.ndarray, ignore: int = -100) -> np.ndarray:
    """Return the gradient of the logits (N, V) from g (N,) and d; it is written over d."""
    if is_device(d):
        return backward_cuda(g, d, t, ignore)
    host("cross_entropy", g, t)
    if usable(d):
        backward_loop((g * (t != ignore)).astype(d.dtype, copy=False), d, *d.shape)
        return d
    return backward_cpu(g, d, t, ignore)
