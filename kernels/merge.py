"""o = sum_b exp(L_b - L) o_b,  L = log sum_b exp L_b: attention over blocks of keys, put together.

A block b of the keys alone gives a query the output o_b and the log-sum-exp L_b of its scores
(kernels/attention).  The outputs of all blocks, weighted by their share of the sum of
exponentials, are the output over all keys (Milakov and Gimelshein, 2018; Dao, 2023, section 2.3).
Blocks are merged one by one, in any order.  A block of which a query sees nothing has L_b = -inf.

Shapes: o (B, S, H, D), L (B, H, S) in float64; the shares are taken in float64 and rounded once.
"""

import numpy as np

from mpipar.errors import BufferMismatchError, explain
from mpipar.kernels.blocks import host


def reference(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return o and L in float64, of all blocks at once."""
    each = np.stack(lses).astype(np.float64)  # (blocks, B, H, S)
    top = np.maximum(each.max(0), -1e300)
    weights = np.exp(each - top)
    total = weights.sum(0)
    weights /= np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    shares = weights.transpose(0, 1, 3, 2)[..., None]  # (blocks, B, S, H, 1)
    out = (shares * np.stack(outs).astype(np.float64)).sum(0)
    return out, np.where(total == 0, -np.inf, lse)


def merge_cpu(out: np.ndarray, lse: np.ndarray, part: np.ndarray, part_lse: np.ndarray) -> None:
    """Merge a block into out and lse, in place; part is used as scratch."""
    total = np.logaddexp(lse, part_lse)
    finite = np.where(np.isneginf(total), 0, total)  # nothing seen so far: all shares are 0
    for x, own in ((out, lse), (part, part_lse)):
        share = np.exp(own - finite).transpose(0, 2, 1)[..., None]  # (B, S, H, 1)
        np.multiply(x, share.astype(x.dtype), out=x)
    out += part
    lse[...] = total


def merge(out: np.ndarray, lse: np.ndarray, part: np.ndarray, part_lse: np.ndarray) -> None:
    """Merge the output and log-sum-exp of one more block into out and lse, in place.

    out and part (B, S, H, D) have one dtype, not a 16-bit one; part is overwritten.
    Raises BufferMismatchError if the shapes or dtypes differ.
    """
    host("merge", out, lse, part, part_lse)
    if (out.shape, out.dtype, lse.shape) != (part.shape, part.dtype, part_lse.shape):
        given = (part.shape, part.dtype.name, part_lse.shape)
        rule = f"they must be those of what it is merged into, {out.shape}, {out.dtype.name}"
        raise BufferMismatchError(explain("block", given, rule, "Pass equal queries"))
    merge_cpu(out, lse, part, part_lse)
