"""out = x_0 + x_1 + ... on a GPU, in this order and rounded once (kernels/reduce.py).

Eight operands are read at once; the total of more waits in a wider array for the next eight.
"""

from collections.abc import Sequence

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.kernels.cast import cast
from mpipar.kernels.device import FLOATS, THREADS, WHOLE, device, kernel
from mpipar.kernels.fours import elementwise, mine, put, take

AT_ONCE = 8
ADD, MAXIMUM, MINIMUM, MULTIPLY = range(4)
OPERATIONS = {"add": ADD, "maximum": MAXIMUM, "minimum": MINIMUM, "multiply": MULTIPLY}  # ufuncs
DTYPES = (*FLOATS, *WHOLE)


@device
def combined(a, b, op):  # type: ignore[no-untyped-def]
    """Return a and b combined; NaN wins over any maximum."""
    if op == ADD:
        return a + b
    if op == MAXIMUM:
        return b if b > a or b != b else a
    if op == MINIMUM:
        return b if b < a or b != b else a
    return a * b


@device
def more(sums, x, i, n, wide, op):  # type: ignore[no-untyped-def]
    """Return four numbers combined with elements i to i + 3 of x."""
    a, b, c, d = sums
    e, f, g, h = take(x, i, n, wide, a)
    return combined(a, e, op), combined(b, f, op), combined(c, g, op), combined(d, h, op)


TAKES = ["T[]"] * AT_ONCE + ["W[]", "T[]", "int32", "int32", "int32", "W", "int32", "int64"]


@kernel(", ".join(TAKES), dtypes=DTYPES, threads=THREADS, fast=False)
def fold(x0, x1, x2, x3, x4, x5, x6, x7, total, out, count, op, ends, divisor, wide, n):  # type: ignore[no-untyped-def]
    """Combine `count` operands; bit 0 of `ends`: the first ones, bit 1: the last ones."""
    i = mine()
    if ends & 1:
        s = take(x0, i, n, wide, divisor)
    else:
        s = more(take(total, i, n, wide, divisor), x0, i, n, wide, op)
    if count > 1:
        s = more(s, x1, i, n, wide, op)
    if count > 2:
        s = more(s, x2, i, n, wide, op)
    if count > 3:
        s = more(s, x3, i, n, wide, op)
    if count > 4:
        s = more(s, x4, i, n, wide, op)
    if count > 5:
        s = more(s, x5, i, n, wide, op)
    if count > 6:
        s = more(s, x6, i, n, wide, op)
    if count > 7:
        s = more(s, x7, i, n, wide, op)
    a, b, c, d = s
    if not ends & 2:
        put(total, i, n, wide, a, b, c, d)
    elif divisor != 1:
        put(out, i, n, wide, a / divisor, b / divisor, c / divisor, d / divisor)
    else:
        put(out, i, n, wide, a, b, c, d)


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
