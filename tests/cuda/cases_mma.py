"""Products on tensor cores: all layouts, edges, rows that do not begin at 16 bytes, batches."""

import sys
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import gelu
from mpipar.kernels.matmul import matmul
from mpipar.kernels.matmul.epilogue import ACCUMULATE, BIAS, RESIDUAL, TRANSPOSE_A, TRANSPOSE_B
from mpipar.kernels.matmul.mma import product_mma
from tests.cuda.compare import close

BOTH = TRANSPOSE_A | TRANSPOSE_B
# dtype, batch, m, n, k, flags
TINY = [
    ("bfloat16", 1, 16, 8, 16, 0),
    ("bfloat16", 1, 20, 17, 40, 0),
    ("float16", 1, 40, 48, 136, TRANSPOSE_A | ACCUMULATE),  # the ring goes round
    ("float16", 1, 20, 17, 40, TRANSPOSE_B),
    ("bfloat16", 2, 24, 40, 72, BOTH | BIAS | RESIDUAL),
    ("bfloat16", 1, 3, 66, 5, 0),
]
LARGE = [
    (dtype, batch, m, n, k, flags | ACCUMULATE | BIAS | RESIDUAL)
    for dtype in ("float16", "bfloat16")
    for flags in (0, TRANSPOSE_A, TRANSPOSE_B, BOTH)
    for batch, m, n, k in ((1, 512, 768, 1024), (3, 200, 136, 328), (2, 131, 67, 259))
]


def run(xp: Any, sizes: str) -> None:
    """Compare with float64."""
    if sizes == "tiny":
        sys.setswitchinterval(1e-5)  # 128 threads hand over to each other all the time
    for dtype, batch, m, n, k, flags in TINY if sizes == "tiny" else LARGE:
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
        product_mma(
            a, b, c, m, n, k, flags,
            batch=batch, a_step=m * k, b_step=k * n, bias=bias, residual=residual,
        )  # fmt: skip
        close(c, wanted)
    chosen(xp)


def chosen(xp: Any) -> None:
    """Take the kernel by matmul's name for it, with what follows a layer's product."""
    draw = np.random.default_rng(3)
    x, w, bias = (draw.standard_normal(s).astype(np.float16) for s in ((5, 16), (7, 16), (7,)))
    wanted = gelu.reference(x.astype(np.float64) @ w.astype(np.float64).T + bias)
    how: dict[str, Any] = {"activation": "gelu", "implementation": "mma"}
    x, w, bias = (aligned(xp, one) for one in (x, w, bias))
    close(matmul(x, w, transpose_b=True, bias=bias, **how), wanted)


def aligned(xp: Any, x: np.ndarray) -> Any:
    """Return x on the device; in NumPy a copy that begins at a multiple of 16 bytes."""
    if xp is not np:
        return xp.asarray(x)
    memory = np.empty(x.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
