"""Attention as an operation; its arithmetic and its tiles are in kernels/attention."""

import math
from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.autograd.record import array, record, record_many
from mpipar.autograd.tensor import check_float
from mpipar.kernels import attention as kernel


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    q_offset: int = 0,
    k_offset: int = 0,
) -> Any:
    """Return softmax(scale q k^T) v for q [B, S, H, D] and k, v [B, K, G, D]: [B, S, H, D].

    H is a multiple of G: query head h uses kv head h // (H/G).  Query i stands at position
    q_offset + i, key j at k_offset + j; causal: a query sees the keys up to its own position, and
    one that sees none gives zeros.  scale: None means 1/sqrt(D).  With `return_lse` the result is
    (out, lse): lse [B, H, S] is log(sum(exp(scores))) in float64, -inf where no key is seen.

    Vaswani et al. (2017), in tiles as Dao (2023).  Raises BufferMismatchError or ConfigError if the
    shapes do not belong together.
    """
    qs, ks, vs = array(q), array(k), array(v)
    check_float("attention", qs, ks, vs)
    kernel.check(qs, ks, vs)
    if scale is None:
        scale = 1 / math.sqrt(qs.shape[3])
    mask = kernel.Mask(causal, scale, q_offset, k_offset)
    out, lse = kernel.forward(qs, ks, vs, mask)

    def vjp(g: Array, dlse: Array | None = None) -> tuple[Array, ...]:
        delta = kernel.row_delta(g, out, dlse)
        return kernel.backward(g, qs, ks, vs, lse, delta, mask, out=_side_by_side(qs, ks, vs))

    if return_lse:
        return record_many((out, lse), (q, k, v), vjp)
    return record(out, (q, k, v), vjp)


def _side_by_side(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array] | None:
    """Return arrays for the gradients that are pieces of one, if q, k and v are; else None.

    `split` then finds the gradient of the whole ready, and copies nothing.
    """
    if q.base is None or not q.base is k.base is v.base or q.shape[1] != k.shape[1]:
        return None
    if q.dtype != k.dtype or k.dtype != v.dtype or v.shape != k.shape:
        return None
    batch, seq, heads, dim = q.shape
    groups = k.shape[2]
    whole = np.empty((batch, seq, heads + 2 * groups, dim), q.dtype)
    return whole[:, :, :heads], whole[:, :, heads:-groups], whole[:, :, -groups:]
