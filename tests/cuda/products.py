"""What the cases of products on tensor cores have in common: operands, and the way to compare."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels.matmul.epilogue import ACCUMULATE, BIAS, RESIDUAL, TRANSPOSE_A, TRANSPOSE_B
from tests.cuda.compare import close

BOTH = TRANSPOSE_A | TRANSPOSE_B


def compare(
    xp: Any, product: Callable[..., Any], dtype: str, batch: int, m: int, n: int, k: int,
    flags: int, **how: Any,
) -> None:  # fmt: skip
    """Compare what `product` makes of random operands with float64; how: what else it takes."""
    draw = np.random.default_rng(m)
    a, b, c, bias, residual = (
        draw.standard_normal(shape).astype(dtype_of(dtype))
        for shape in ((batch, m, k), (batch, k, n), (batch, m, n), (n,), (batch, m, n))
    )
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    for flag, one in ((ACCUMULATE, c), (BIAS, bias), (RESIDUAL, residual)):
        wanted += one.astype(np.float64) if flags & flag else 0
    if flags & TRANSPOSE_A:
        a = np.ascontiguousarray(a.transpose(0, 2, 1))
    if flags & TRANSPOSE_B:
        b = np.ascontiguousarray(b.transpose(0, 2, 1))
    a, b, c, bias, residual = (aligned(xp, x) for x in (a, b, c, bias, residual))
    product(
        a, b, c, m, n, k, flags,
        batch=batch, a_step=m * k, b_step=k * n, bias=bias, residual=residual, **how,
    )  # fmt: skip
    close(c, wanted)


def aligned(xp: Any, x: np.ndarray) -> Any:
    """Return x on the device; in NumPy a copy that begins at a multiple of 16 bytes."""
    if xp is not np:
        return xp.asarray(x)
    memory = np.empty(x.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
