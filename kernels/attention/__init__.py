"""o_i = sum_j p_ij v_j,  p_ij = exp(s_ij - L_i),  s_ij = scale q_i k_j,  L_i = log sum_j exp s_ij.

Scaled dot-product attention in tiles (Dao, FlashAttention-2, 2023): a tile of queries, all heads of
a kv group together, meets the keys up to its last position, so the full matrix of scores never
exists.  Backward computes p again from the log-sum-exp L:

    D_i = do_i . o_i - dL_i        dv_j = sum_i p_ij do_i          ds_ij = p_ij (do_i . v_j - D_i)
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i

Shapes: q (B, S, H, D), k and v (B, K, G, D) with H a multiple of G: query head h uses kv head
h // (H/G) (Ainslie et al., GQA, 2023).  Query i stands at position q_offset + i, key j at k_offset
+ j; causal: a query sees the keys at positions up to its own.  A query that sees none gets o = 0
and L = -inf.

L is float64: at scores of 1e4 a float32 L would cost p three digits.  Backward splits it into a
float32 part, subtracted from the scores, and the rest, which goes into the rows of do.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device, module_of
from mpipar.kernels.attention.cpu import backward_cpu, forward_cpu
from mpipar.kernels.attention.cuda import backward_cuda, forward_cuda
from mpipar.kernels.attention.formula import Gradients, Mask, Pump, check, nothing, reference
from mpipar.kernels.attention.native import backward_native, forward_native, suits
from mpipar.kernels.blocks import host

__all__ = ["Gradients", "Mask", "Pump", "backward", "check", "forward", "reference", "row_delta"]


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask, pump: Pump = nothing
) -> tuple[np.ndarray, np.ndarray]:
    """Return o (B, S, H, D) of q's dtype, and L (B, H, S) in float64.

    pump: called before every tile, so that messages advance meanwhile.
    """
    check(q, k, v)
    if is_device(q):
        return forward_cuda(q, k, v, mask)
    host("attention", k, v)
    if suits(q, k, v):
        return forward_native(q, k, v, mask, pump)
    return forward_cpu(q, k, v, mask, pump)


def row_delta(do: np.ndarray, o: np.ndarray, dlse: np.ndarray | None = None) -> np.ndarray:
    """Return D (B, H, S) in float64 from do and o (B, S, H, D), and dL (B, H, S) if given."""
    wide = compute_dtype(o.dtype)
    einsum = module_of(o).einsum
    delta = einsum("bshd,bshd->bhs", do.astype(wide, copy=False), o.astype(wide, copy=False))
    return delta.astype(np.float64) if dlse is None else delta - dlse.astype(np.float64)


def backward(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask, pump: Pump = nothing,
    out: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of q, k and v, in `out` if given.

    lse: L, and delta: D by `row_delta`.  Where k and v are one block of a longer sequence (ring
    attention), these are the L and D of all keys, and the results are the block's part.  pump: as
    for `forward`.
    """
    if out is None:
        xp = module_of(q)
        out = xp.empty(q.shape, q.dtype), xp.empty(k.shape, k.dtype), xp.empty(v.shape, v.dtype)
    if is_device(q):
        return backward_cuda(do, q, k, v, lse, delta, mask, out)
    host("attention", do, k, v)
    if suits(q, k, v, do, *out):
        return backward_native(do, q, k, v, lse, delta, mask, pump, out)
    return backward_cpu(do, q, k, v, lse, delta, mask, pump, out)
