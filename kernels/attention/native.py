"""Attention on the CPU by loops in machine code (kernels/attention/loops.py), for float32."""

from collections.abc import Iterator

import numpy as np

from mpipar.kernels.attention import loops
from mpipar.kernels.attention.cpu import split
from mpipar.kernels.attention.formula import Gradients, Mask, Pump
from mpipar.kernels.native import FLOAT32, usable

WORK = 1 << 26  # floating-point operations of a call, about 1 ms: between calls messages advance


def suits(*arrays: np.ndarray) -> bool:
    """Say whether the loops take these q, k, v (B, S, H, D) and their like."""
    width = arrays[0].shape[3]
    for x in arrays:
        if type(x) is not np.ndarray or x.dtype != FLOAT32 or x.shape[3] != width or not x.size:
            return False
        if x.strides[3] != 4 or any(step % 4 for step in x.strides):
            return False
    return usable()


def _sizes(mask: Mask, q: np.ndarray, k: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Return what the loops must know: numbers, sizes, and steps of q, k and the others.

    groups, heads of a group, queries, keys, D, ahead; then three steps of each array in elements:
    to the next of the batch, of the sequence and of the heads.
    """
    groups, keys = k.shape[2], k.shape[1]
    ahead = mask.q_offset - mask.k_offset if mask.causal else keys
    steps = [step // 4 for x in (q, k, *others) for step in x.strides[:3]]
    counts = groups, q.shape[2] // groups, q.shape[1], keys, q.shape[3], ahead
    return np.array([*counts, *steps], np.int64)


def _pieces(q: np.ndarray, k: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Yield kv heads (first, last), counted over the batch, and queries (start, stop) of a call."""
    batch, seq, _, width = q.shape
    groups, one = k.shape[2], 4 * (q.shape[2] // k.shape[2]) * k.shape[1] * width  # of a query
    if one * seq <= WORK:
        some = max(1, WORK // (one * seq))
        for first in range(0, batch * groups, some):
            yield first, min(first + some, batch * groups), 0, seq
        return
    rows = loops.above(max(1, WORK // one), loops.BACK)
    for pair in range(batch * groups):
        for start in range(0, seq, rows):
            yield pair, pair + 1, start, min(start + rows, seq)


def forward_native(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Mask, pump: Pump
) -> tuple[np.ndarray, np.ndarray]:
    """Return o and L."""
    batch, seq, heads, width = q.shape
    out = np.empty(q.shape, q.dtype)
    total, top = np.empty((2, batch, heads, seq), q.dtype)
    space = np.empty(loops.forward_space(k.shape[1], width), q.dtype)
    sizes = _sizes(mask, q, k, v, out)
    for piece in _pieces(q, k):
        pump()
        loops.forward_loop(q, k, v, out, total, top, space, sizes, *piece, mask.scale)
    with np.errstate(divide="ignore"):
        return out, np.log(total, dtype=np.float64) + top  # -inf where no key is seen


def backward_native(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    lse: np.ndarray, delta: np.ndarray, mask: Mask, pump: Pump, out: Gradients,
) -> Gradients:  # fmt: skip
    """Write the gradients of q, k and v to `out`, and return it; lse and delta are float64."""
    head, rest = split(lse, q.dtype)
    top = np.zeros(lse.shape, q.dtype) if head is None else head
    shift = np.multiply(delta, -rest).astype(q.dtype)
    space = np.empty(loops.backward_space(k.shape[1], q.shape[3]), q.dtype)
    sizes = _sizes(mask, q, k, v, do, *out)
    for piece in _pieces(q, k):
        pump()
        loops.backward_loop(
            do, q, k, v, top, rest, shift, *out, space, sizes, *piece, mask.scale
        )  # fmt: skip
    return out
