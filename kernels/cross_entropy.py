"""loss_n = (1 - e) * (L_n - x_{n,t_n}) + e * (L_n - mean_v x_{n,v}),  L_n = log sum_v exp x_{n,v}.

Softmax and negative log-likelihood in one pass over the logits, with label smoothing e (Szegedy et
al. 2016, as in PyTorch).  Rows whose target is `ignore` count nothing.  Backward:

    dx_{n,v} = g_n * (p_{n,v} - (1 - e) [v = t_n] - e / V)        p = softmax(x)

Forward leaves p for backward, which turns it into the gradient in place.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.errors import ConfigError, explain
from mpipar.kernels.blocks import host, matrix, row_blocks, row_max, row_sums, scratch, widen


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
    x: np.ndarray, t: np.ndarray, smoothing: float, ignore: int, probabilities: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the loss of each row, and p if asked."""
    n, v = x.shape
    wide = compute_dtype(x.dtype)
    losses = np.empty(n, wide)
    p = np.empty((n, v), x.dtype) if probabilities else None
    space = scratch(n, v, wide)
    valid = t != ignore
    target = np.where(valid, t, 0)
    for block in row_blocks(n, v, wide.itemsize):
        part = widen(x[block])
        y = space[: len(part)]
        np.subtract(part, row_max(part), out=y)
        picked = y[np.arange(len(y)), target[block]]
        average = row_sums(y) / v if smoothing else 0.0
        np.exp(y, out=y)
        total = row_sums(y)
        losses[block] = np.log(total) - (1 - smoothing) * picked - smoothing * average
        if p is not None:
            np.multiply(y, (1 / total)[:, None], out=p[block], casting="same_kind")
    losses *= valid
    return losses, p


def backward_cpu(
    g: np.ndarray, p: np.ndarray, t: np.ndarray, smoothing: float, ignore: int
) -> np.ndarray:
    """Return the gradient of the logits, written over p."""
    n, v = p.shape
    valid = t != ignore
    target = np.where(valid, t, 0)
    scale = (g * valid).astype(compute_dtype(p.dtype))
    for block in row_blocks(n, v, 4):
        part = widen(p[block])
        part[np.arange(len(part)), target[block]] -= 1 - smoothing
        if smoothing:
            part -= smoothing / v
        np.multiply(part, scale[block, None], out=p[block], casting="same_kind")
    return p


def forward(
    x: np.ndarray,
    t: np.ndarray,
    smoothing: float = 0.0,
    ignore: int = -100,
    probabilities: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the loss of each row (N,), float32 or wider, and softmax(x) if asked.

    x: logits (N, V).  t: integer targets (N,).
    Raises ConfigError naming the first target outside 0..V-1 that is not `ignore`.
    """
    host("cross_entropy", x, t)
    bad = (t != ignore) & ((t < 0) | (t >= x.shape[1]))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        rule = f"a target is between 0 and {x.shape[1] - 1}, or ignore_index={ignore}"
        raise ConfigError(explain(f"targets[{first}]", int(t[first]), rule, "Check the vocabulary"))
    return forward_cpu(matrix(x), t, smoothing, ignore, probabilities)


def backward(
    g: np.ndarray, p: np.ndarray, t: np.ndarray, smoothing: float = 0.0, ignore: int = -100
) -> np.ndarray:
    """Return the gradient of the logits (N, V) from g (N,); it is written over p."""
    host("cross_entropy", g, p, t)
    return backward_cpu(g, p, t, smoothing, ignore)
