"""Products on Hopper's tensor cores: layouts, edges, batches, and what follows the product."""

import sys
from typing import Any

import numpy as np
import pytest

from mpipar.arrays import dtype as dtype_of
from mpipar.errors import ConfigError
from mpipar.kernels.matmul import Task, matmul, reference
from mpipar.kernels.matmul.epilogue import ACCUMULATE, BIAS, RESIDUAL, TRANSPOSE_A, TRANSPOSE_B
from mpipar.kernels.matmul.wgmma import CAPABILITY, WIDTH, product_wgmma
from tests.cuda.compare import close
from tests.cuda.products import BOTH, aligned, compare

# dtype, batch, m, n, k, flags, width of a tile
TINY = [
    ("float16", 1, 72, 40, 264, 0, 64),  # the ring goes round
    ("bfloat16", 2, 24, 20, 72, TRANSPOSE_B | BIAS | RESIDUAL, 64),  # C's rows begin anywhere
]
LARGE = [
    (dtype, batch, m, n, k, flags | ACCUMULATE | BIAS | RESIDUAL, WIDTH)
    for dtype in ("float16", "bfloat16")
    for flags in (0, TRANSPOSE_A, TRANSPOSE_B, BOTH)
    for batch, m, n, k in ((1, 512, 768, 1024), (3, 200, 136, 328), (2, 8, 1000, 64))
] + [("bfloat16", 2, 131, 67, 4104, TRANSPOSE_B, WIDTH)]


def run(xp: Any, sizes: str) -> None:
    """Compare with float64."""
    if sizes == "tiny":
        sys.setswitchinterval(1e-4)  # 256 threads hand over to each other all the time
    elif xp.cuda.Device().compute_capability != CAPABILITY:
        print("no Hopper: nothing to run")
        return
    for dtype, batch, m, n, k, flags, width in TINY if sizes == "tiny" else LARGE:
        compare(xp, product_wgmma, dtype, batch, m, n, k, flags, width=width)
    chosen(xp)


def chosen(xp: Any) -> None:
    """Take the kernel by matmul's name for it, with all that can follow a product."""
    draw = np.random.default_rng(3)
    shapes = {"a": (21, 40), "b": (21, 24), "bias": (24,), "up": (40, 24), "residual": (40, 24)}
    given: dict[str, Any] = {
        name: draw.standard_normal(shape).astype(dtype_of("bfloat16"))
        for name, shape in shapes.items()
    }
    out = draw.standard_normal((40, 24)).astype(dtype_of("bfloat16"))
    how: dict[str, Any] = {"transpose_a": True, "activation": "silu", "accumulate": True}
    wanted = reference(Task(**given, **how), out)
    on = {name: aligned(xp, x) for name, x in given.items()}
    held = aligned(xp, out)
    matmul(**on, **how, out=held, implementation="wgmma")
    close(held, wanted)
    with pytest.raises(ConfigError, match="16 bytes"):
        matmul(on["a"], on["b"][:, :20], transpose_a=True, implementation="wgmma")
