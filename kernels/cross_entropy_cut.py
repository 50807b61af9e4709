"""Cross-entropy of logits x (N, V) that are cut by columns over ranks: what each does with its own.

    m = max over ranks of maxima(x)
    S, z, Z = sum over ranks of sums(x, m)        sums of e^(x - m); x_t - m; sums of x - m
    loss = (1 - e) (log S - z) + e (log S - Z / V)
    dx = slope(...) = g (e^(x - m) / S - (1 - e) [v = t] - e / V)

On the CPU the exponentials are kept for the slope, which is written over them; on a GPU the logits
are read again.  (mpipar/parallel/tensor/vocab.py sends the messages between.)
"""

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_device
from mpipar.kernels.blocks import host, row_blocks, row_max, row_sums, widen
from mpipar.kernels.cross_entropy_cuda import maxima_cuda, slope_cuda, sums_cuda


def maxima(x: Array) -> Array:
    """Return the maximum of each row of x (N, V/p), float32 or wider: -inf of no columns."""
    if is_device(x):
        return maxima_cuda(x)
    host("cross_entropy", x)
    out = np.full(len(x), -np.inf, compute_dtype(x.dtype))
    if x.shape[1]:
        for cut in row_blocks(len(x), x.shape[1], out.itemsize):
            out[cut] = row_max(widen(x[cut]))[:, 0]
    return out


def sums(x: Array, top: Array, column: Array, smoothing: float) -> tuple[Array, Array]:
    """Return what `slope` needs of x (N, V/p), and what the ranks add up: (2, N), with smoothing 3.

    top: the maxima over all ranks (N,).  column: the target's among those of this rank, or -1 (N,).
    """
    if is_device(x):
        return x, sums_cuda(x, top, column, smoothing)
    host("cross_entropy", top, column)
    exps = np.empty(x.shape, top.dtype)
    total = np.zeros((3 if smoothing else 2, len(x)), top.dtype)
    for cut in row_blocks(len(x), x.shape[1], top.itemsize):
        part = exps[cut]
        np.subtract(x[cut], top[cut, None], out=part, dtype=top.dtype)
        if smoothing:
            total[2, cut] = row_sums(part)
        np.exp(part, out=part)
        total[0, cut] = row_sums(part)
    mine = np.flatnonzero(column >= 0)
    total[1, mine] = x[mine, column[mine]].astype(top.dtype) - top[mine]
    return exps, total


def slope(
    kept: Array, top: Array, total: Array, scale: Array, column: Array, smoothing: float,
    vocab: int, dtype: np.dtype,
) -> Array:  # fmt: skip
    """Return the gradient of this rank's logits (N, V/p), of their dtype; written over `kept`.

    total: the sums of e^(x - m) over all ranks (N,).  scale: the gradient of each row's loss (N,),
    0 where it is ignored.  vocab: V.
    """
    if is_device(kept):
        return slope_cuda(kept, top, total, scale, column, smoothing, vocab)
    host("cross_entropy", total, scale, column)
    spread, share = (scale * (smoothing / vocab))[:, None], (scale / total)[:, None]
    for cut in row_blocks(len(kept), kept.shape[1], kept.itemsize):
        kept[cut] *= share[cut]
        if smoothing:
            kept[cut] -= spread[cut]
    mine = np.flatnonzero(column >= 0)
    kept[mine, column[mine]] -= (1.0 - smoothing) * scale[mine]
    return kept.astype(dtype, copy=False)
