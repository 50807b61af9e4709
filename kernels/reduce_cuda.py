"""out = x_0 + x_1 + ... on a GPU, in this order and rounded once (kernels/reduce.py).

Eight operands are read at once; the total of more waits in a wider array for the next eight.
"""

from collections.abc import Sequence

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.cast import cast
from mpipar.kernels.device import (
    FLOATS,
    FOUR,
    THREADS,
    WHOLE,
    cuda,
    device,
    elementwise,
    kernel,
    narrow,
    widen,
)

AT_ONCE = 8
OPERATIONS = {"add": 0, "maximum": 1, "minimum": 2, "multiply": 3}  # names of NumPy's ufuncs
DTYPES = (*FLOATS, *WHOLE)


@device
def combined(a, b, op):  # type: ignore[no-untyped-def]
    """Return a and b combined; NaN wins over any maximum."""
    if op == 0:
        return a + b
    if op == 1:
        return b if b > a or b != b else a
    if op == 2:
        return b if b < a or b != b else a
    return a * b


TAKES = ", ".join(["T[]"] * AT_ONCE + ["W[]", "T[]", "int32", "int32", "int32", "W", "int64"])


@kernel(TAKES, dtypes=DTYPES, threads=THREADS, fast=False)
def fold(x0, x1, x2, x3, x4, x5, x6, x7, total, out, count, op, ends, divisor, n):  # type: ignore[no-untyped-def]
    """Combine `count` operands; bit 0 of `ends`: the first ones, bit 1: the last ones."""
    start = cuda.blockIdx.x * (THREADS * FOUR) + cuda.threadIdx.x
    for k in range(FOUR):
        i = start + k * THREADS
        if i < n:
            a = widen(x0[i])
            if not ends & 1:
                a = combined(total[i], a, op)
            if count > 1:
                a = combined(a, widen(x1[i]), op)
            if count > 2:
                a = combined(a, widen(x2[i]), op)
            if count > 3:
                a = combined(a, widen(x3[i]), op)
            if count > 4:
                a = combined(a, widen(x4[i]), op)
            if count > 5:
                a = combined(a, widen(x5[i]), op)
            if count > 6:
                a = combined(a, widen(x6[i]), op)
            if count > 7:
                a = combined(a, widen(x7[i]), op)
            if not ends & 2:
                total[i] = a
            elif divisor != 1:
                out[i] = narrow(a / divisor, out)
            else:
                out[i] = narrow(a, out)


def fold_cuda(name: str, operands: Sequence[Array], out: Array, divisor: float = 1) -> None:
    """Write the combination of the operands, left to right, into `out`; all 1-D of one size.

    name: of NumPy's ufunc.  `out` may be one of the operands, and has their dtype, or one is a
    16-bit float and the other float32; integers are not divided.
    """
    if out.dtype != operands[0].dtype:
        wide = compute_dtype(out.dtype)
        sum_ = out if out.dtype == wide else module_of(out).empty(out.shape, wide)
        fold_cuda(name, [cast(x, wide) for x in operands], sum_, divisor)
        if sum_ is not out:
            out[...] = cast(sum_, out.dtype)
        return
    groups = [operands[n : n + AT_ONCE] for n in range(0, len(operands), AT_ONCE)]
    size = out.size if len(groups) > 1 else 0
    total = module_of(out).empty(size, compute_dtype(out.dtype))
    for number, group in enumerate(groups):
        ends = (number == 0) + 2 * (number == len(groups) - 1)
        eight = (*group, *[group[0]] * (AT_ONCE - len(group)))
        numbers = (len(group), OPERATIONS[name], ends, divisor)
        elementwise(fold, *eight, total, out, *numbers, n=out.size)
