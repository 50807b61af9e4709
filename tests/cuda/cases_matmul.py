"""Matrix products against float64."""

from typing import Any

import numpy as np

from mpipar.kernels.matmul import epilogue, simt


def run(xp: Any, sizes: str) -> None:
    """Multiply one uneven shape, B transposed, with bias, residual and what C holds."""
    m, n, k = (5, 9, 11) if sizes == "tiny" else (515, 259, 131)
    draw = np.random.default_rng(3)
    shapes = (m, k), (n, k), (m, n), (n,), (m, n)
    a, b, c, bias, residual = (draw.standard_normal(s).astype(np.float32) for s in shapes)
    flags = epilogue.TRANSPOSE_B | epilogue.BIAS | epilogue.RESIDUAL | epilogue.ACCUMULATE
    expected = a.astype(np.float64) @ b.T + bias + residual + c
    on = [xp.asarray(x) for x in (a, b, c, bias, residual, residual)]
    tiles = -(-m // simt.TILE) * -(-n // simt.TILE)
    simt.single(tiles, simt.THREADS, *on, m, n, k, m * k, n * k, flags)
    got = on[2] if xp is np else on[2].get()
    assert np.abs(got - expected).max() < 1e-4
