"""The end of a product for eight neighbours of a row at once, of 16-bit numbers: 16 bytes each."""

from typing import Any

import numpy as np

from mpipar.kernels.device import device
from mpipar.kernels.matmul.epilogue import ACCUMULATE, BIAS, GELU, RESIDUAL, SILU, UP, after
from mpipar.kernels.ptx import (
    address,
    join_bf16,
    join_f16,
    load4,
    quad,
    split_bf16,
    split_f16,
    store4,
)

ZERO = np.uint32(0)
FOLLOWED = ACCUMULATE | BIAS | GELU | SILU | UP | RESIDUAL


@device
def words(x: Any, place: Any, there: Any) -> Any:
    """Return 16 bytes, or zeros."""
    found = (ZERO, ZERO, ZERO, ZERO)
    if there:
        found = load4(address(x, place))
    return found


@device
def split(word: Any, brain: Any) -> Any:
    """Return the two numbers of a word in float32."""
    if brain:
        return split_bf16(word)
    return split_f16(word)


@device
def join(v: Any, w: Any, brain: Any) -> Any:
    """Return a word of two numbers, each rounded once."""
    if brain:
        return join_bf16(v, w)
    return join_f16(v, w)


@device
def two(
    v: Any, w: Any, bias: Any, up: Any, residual: Any, old: Any, flags: Any, c: Any, brain: Any
) -> Any:
    """Return a word with what becomes of two sums."""
    b0, b1 = split(bias, brain)
    u0, u1 = split(up, brain)
    r0, r1 = split(residual, brain)
    o0, o1 = split(old, brain)
    v, w = after(v, b0, u0, r0, o0, flags, c), after(w, b1, u1, r1, o1, flags, c)
    return join(v, w, brain)


@device
def finish8(
    sums: Any, at: Any, c: Any, bias: Any, up: Any, residual: Any, batch: Any, row: Any,
    column: Any, m: Any, n: Any, flags: Any, brain: Any,
) -> Any:  # fmt: skip
    """Write elements (row, column..column + 7) of a matrix of C, if they are inside.

    Their sums are in shared memory, from `at`; n and all places are multiples of 8 elements.
    """
    if row < m and column < n:
        place = (batch * m + row) * n + column
        v0, v1, v2, v3 = quad(sums, at)
        v4, v5, v6, v7 = quad(sums, at + 4)
        if flags & FOLLOWED == 0:
            store4(
                address(c, place), join(v0, v1, brain), join(v2, v3, brain), join(v4, v5, brain),
                join(v6, v7, brain),
            )  # fmt: skip
            return
        b0, b1, b2, b3 = words(bias, column, flags & BIAS)
        u0, u1, u2, u3 = words(up, place, flags & UP)
        r0, r1, r2, r3 = words(residual, place, flags & RESIDUAL)
        o0, o1, o2, o3 = words(c, place, flags & ACCUMULATE)
        store4(
            address(c, place),
            two(v0, v1, b0, u0, r0, o0, flags, c, brain),
            two(v2, v3, b1, u1, r1, o1, flags, c, brain),
            two(v4, v5, b2, u2, r2, o2, flags, c, brain),
            two(v6, v7, b3, u3, r3, o3, flags, c, brain),
        )
