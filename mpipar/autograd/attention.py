"""Attention as an operation; its arithmetic and its tiles are in kernels/attention.py."""

import math
from typing import Any

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
        return kernel.backward(g, qs, ks, vs, lse, kernel.row_delta(g, out, dlse), mask)

    if return_lse:
        return record_many((out, lse), (q, k, v), vjp)
    return record(out, (q, k, v), vjp)
