"""out = x_0 + x_1 + ... + x_{k-1}, added in exactly this order.

The sum (or maximum, minimum, product) of k equal buffers, for the reductions of collectives and of
gradient buckets.  The order of the operands is part of the result: the same operands in the same
order give the same bits.  16-bit floats are added in float32 and rounded once at the end.

Cost on the CPU: blocks that stay in the cache, so that every operand is read from memory once and
the result is written once.
"""

import math
from collections.abc import Sequence

import numpy as np

from mpipar.arrays import compute_dtype, is_device, is_sixteen_bit
from mpipar.kernels.reduce_cuda import fold_cuda

COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
BLOCK_BYTES = 1 << 18  # of the result, which stays in a 1 MiB cache while operands are added to it


def reference(operands: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    """Return the reduction in float64 (for the tests)."""
    total = operands[0].astype(np.float64)
    for operand in operands[1:]:
        total = COMBINE[op](total, operand.astype(np.float64))
    return total / len(operands) if op == "mean" else total


def fold(
    combine: np.ufunc, operands: Sequence[np.ndarray], out: np.ndarray, divisor: float = 1
) -> None:
    """Write the combination of the operands, left to right, into `out`; all are 1-D of one size.

    `out` may be one of the operands, and has their dtype, or one is a 16-bit float and the other
    float32.  A `divisor` other than 1 divides the total before it is rounded (for "mean").
    """
    if is_device(out):
        fold_cuda(combine.__name__, operands, out, divisor)
        return
    step = BLOCK_BYTES // out.dtype.itemsize
    narrow = is_sixteen_bit(out.dtype) or is_sixteen_bit(operands[0].dtype)
    if narrow or any(np.may_share_memory(out, operand) for operand in operands[2:]):
        combined = _combine_aside
    elif len(operands) == 1:
        if out is not operands[0]:
            np.copyto(out, operands[0])
        operands, combined = [out], _combine
    else:
        combined = _combine
    if out.size <= step:
        combined(combine, operands, out, divisor)
        return
    for start in range(0, out.size, step):
        part = slice(start, start + step)
        combined(combine, [operand[part] for operand in operands], out[part], divisor)


def _combine(
    combine: np.ufunc, operands: Sequence[np.ndarray], out: np.ndarray, divisor: float
) -> None:
    """Fold a block in place; `out` is none of the operands but the first two."""
    if len(operands) > 1:
        combine(operands[0], operands[1], out=out)
    for operand in operands[2:]:
        combine(out, operand, out=out)
    _divide(out, divisor)


def _combine_aside(
    combine: np.ufunc, operands: Sequence[np.ndarray], out: np.ndarray, divisor: float
) -> None:
    """Fold a block in a scratch block of wider numbers; `out` may be any of the operands."""
    wide = compute_dtype(out.dtype)
    total = np.empty(out.size, wide)
    if len(operands) == 1:
        np.copyto(total, operands[0], casting="unsafe")
    else:
        combine(operands[0], operands[1], out=total, dtype=wide)
    for operand in operands[2:]:
        combine(total, operand, out=total, dtype=wide)
    _divide(total, divisor)
    np.copyto(out, total, casting="unsafe")


def _divide(total: np.ndarray, divisor: float) -> None:
    """Divide in place; by a power of two as a product, which has the same bits in less time."""
    if divisor == 1:
        return
    if total.dtype.kind == "f" and math.frexp(divisor)[0] == 0.5:
        np.multiply(total, 1 / divisor, out=total)
    else:
        np.divide(total, divisor, out=total)
