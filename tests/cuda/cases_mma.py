"""Products on tensor cores: all layouts, edges, rows that do not begin at 16 bytes, batches."""

import sys
from typing import Any

import numpy as np

from mpipar.kernels import gelu
from mpipar.kernels.matmul import matmul
from mpipar.kernels.matmul.epilogue import ACCUMULATE, BIAS, RESIDUAL, TRANSPOSE_A, TRANSPOSE_B
from mpipar.kernels.matmul.mma import product_mma
from tests.cuda.compare import close
from tests.cuda.products import BOTH, aligned, compare

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
        compare(xp, product_mma, dtype, batch, m, n, k, flags)
    chosen(xp)


def chosen(xp: Any) -> None:
    """Take the kernel by matmul's name for it, with what follows a layer's product."""
    draw = np.random.default_rng(3)
    x, w, bias = (draw.standard_normal(s).astype(np.float16) for s in ((5, 16), (7, 16), (7,)))
    wanted = gelu.reference(x.astype(np.float64) @ w.astype(np.float64).T + bias)
    how: dict[str, Any] = {"activation": "gelu", "implementation": "mma"}
    x, w, bias = (aligned(xp, one) for one in (x, w, bias))
    close(matmul(x, w, transpose_b=True, bias=bias, **how), wanted)
