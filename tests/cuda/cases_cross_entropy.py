"""Cross-entropy, whole and cut over the vocabulary: losses and gradients of the logits."""

from typing import Any

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import cross_entropy
from mpipar.kernels.cross_entropy_cuda import (
    backward_cuda,
    forward_cuda,
    maxima_cuda,
    slope_cuda,
    sums_cuda,
)
from mpipar.kernels.device import FLOATS
from tests.cuda.compare import close

TINY = {"float32": [(3, 35), (1, 1032)], "bfloat16": [(2, 12)]}
LARGE = [(129, 1000), (100, 50_257), (33, 3)]
IGNORE = -100


def run(xp: Any, sizes: str) -> None:
    """Compare with the formula, and gradients with those of the CPU in float64."""
    for number, name in enumerate(FLOATS):
        for n, v in TINY.get(name, [(2, 33)]) if sizes == "tiny" else LARGE:
            rng = np.random.default_rng(number)
            x = (20 + 3 * rng.standard_normal((n, v))).astype(dtype_of(name))
            t, g = rng.integers(0, v, n), rng.standard_normal(n)
            t[1:2] = IGNORE
            for smoothing in (0.0, 0.1) if sizes != "tiny" else (0.0 if n == 3 else 0.1,):
                whole(xp, x, t, g, smoothing)
                cut(xp, x, t, g, smoothing)


def whole(xp: Any, x: np.ndarray, t: np.ndarray, g: np.ndarray, smoothing: float) -> None:
    """Compare rows that one kernel has whole."""
    logits, targets, grad = (xp.asarray(a) for a in (x, t, g))
    losses, _ = forward_cuda(logits, targets, smoothing, IGNORE, False)
    close(losses, cross_entropy.reference(x, t, smoothing, IGNORE), 16)
    again, d = forward_cuda(logits, targets.astype(np.int32), smoothing, IGNORE, True)
    close(again, cross_entropy.reference(x, t, smoothing, IGNORE), 16)
    close(backward_cuda(grad, d, targets, IGNORE), gradient(x, t, g, smoothing), 32)


def gradient(x: np.ndarray, t: np.ndarray, g: np.ndarray, smoothing: float) -> np.ndarray:
    """Return the gradient of the logits in float64."""
    _, d = cross_entropy.forward_cpu(x.astype(np.float64), t, smoothing, IGNORE, True)
    assert d is not None
    return cross_entropy.backward_cpu(g, d, t, IGNORE)


def cut(xp: Any, x: np.ndarray, t: np.ndarray, g: np.ndarray, smoothing: float) -> None:
    """Compare rows that lie on two ranks, whose messages are added here."""
    v, first = x.shape[1], x.shape[1] // 3
    blocks = [xp.asarray(x[:, :first].copy()), xp.asarray(x[:, first:].copy())]
    places = [np.where((t >= 0) & (t < first), t, -1), np.where(t >= first, t - first, -1)]
    columns = [xp.asarray(a) for a in places]
    top = xp.maximum(*(maxima_cuda(block) for block in blocks))
    close(top, x.astype(np.float64).max(1), 0)
    pairs = list(zip(blocks, columns, strict=True))
    sums = sum(sums_cuda(block, top, column, smoothing) for block, column in pairs)
    valid = xp.asarray(t != IGNORE)
    loss = xp.log(sums[0]) - (1 - smoothing) * sums[1]
    if smoothing:
        loss -= smoothing * sums[2] / v
    close(loss * valid, cross_entropy.reference(x, t, smoothing, IGNORE), 16)
    scale = (xp.asarray(g) * valid).astype(compute_dtype(x.dtype))
    wanted = gradient(x, t, g, smoothing)
    for (block, column), right in zip(pairs, (wanted[:, :first], wanted[:, first:]), strict=True):
        close(slope_cuda(block, top, sums[0], scale, column, smoothing, v), right, 32)
