"""out = x_0 + x_1 + ... + x_{k-1}, added in exactly this order.

The sum (or maximum, minimum, product) of k equal buffers, for the reductions of collectives and of
gradient buckets.  The order of the operands is part of the result: the same operands in the same
order give the same bits.  16-bit floats are added in float32 and rounded once at the end.

Cost on the CPU: for two operands one pass; for more, blocks that stay in the cache, so that every
operand is read from memory once and the result is written once.
"""

from collections.abc import Sequence

import numpy as np

from mpipar.arrays import compute_dtype, is_sixteen_bit

COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
BLOCK = 16384  # elements: k operands of a block and the result stay in a 1 MiB cache


def reference(operands: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    """Return the reduction in float64 (for the tests)."""
    total = operands[0].astype(np.float64)
    for operand in operands[1:]:
        total = COMBINE[op](total, operand.astype(np.float64))
    return total / len(operands) if op == "mean" else total


def fold(
    combine: np.ufunc, operands: Sequence[np.ndarray], out: np.ndarray, divisor: float = 1
) -> None:
    """Write the combination of the operands, left to right, into `out`; all are 1-D of one dtype.

    `out` may be one of the operands.  A `divisor` other than 1 divides the total before it is
    rounded to the dtype (for "mean").
    """
    if is_sixteen_bit(out.dtype):
        _fold_blocked(combine, operands, out, divisor)
    elif len(operands) == 1:
        if out is not operands[0]:
            np.copyto(out, operands[0])
    elif len(operands) == 2:
        combine(operands[0], operands[1], out=out)
    else:
        _fold_blocked(combine, operands, out, divisor)
        return
    if divisor != 1 and not is_sixteen_bit(out.dtype):
        np.divide(out, divisor, out=out)


def _fold_blocked(
    combine: np.ufunc, operands: Sequence[np.ndarray], out: np.ndarray, divisor: float
) -> None:
    """Fold block by block through a scratch block, so that `out` may be any of the operands."""
    wide = compute_dtype(out.dtype)
    scratch = np.empty(min(BLOCK, out.size), wide)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        total = scratch[: stop - start]
        if len(operands) == 1:
            np.copyto(total, operands[0][start:stop], casting="unsafe")
        else:
            combine(operands[0][start:stop], operands[1][start:stop], out=total, dtype=wide)
        for operand in operands[2:]:
            combine(total, operand[start:stop], out=total, dtype=wide)
        if divisor != 1:
            np.divide(total, divisor, out=total)
        np.copyto(out[start:stop], total, casting="unsafe")
