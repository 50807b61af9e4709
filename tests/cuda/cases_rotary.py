"""Rotary position embedding, forth and back, of whole arrays and of parts of a projection."""

from typing import Any

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import rotary
from mpipar.kernels.device import FLOATS
from mpipar.kernels.rotary_cuda import rotate_cuda
from tests.cuda.compare import close

TINY = [(1, 3, 2, 6), (2, 2, 3, 26)]
LARGE = [(4, 1000, 12, 64), (3, 129, 5, 80), (2, 7, 40, 128)]
BASE = 10000.0


def run(xp: Any, sizes: str) -> None:
    """Compare with the formula; turning back gives x again, within roundings."""
    for number, name in enumerate(FLOATS):
        for batch, seq, heads, dim in TINY if sizes == "tiny" else LARGE:
            rng = np.random.default_rng(number)
            fused = rng.standard_normal((batch, seq, 2 * heads, dim)).astype(dtype_of(name))
            x, part = fused[:, :, heads:], xp.asarray(fused)[:, :, heads:]
            for shape in ((seq,), (batch, seq)):
                places = rng.integers(0, 5000, shape)
                table = rotary.table(places, dim, BASE, compute_dtype(x.dtype))
                cos, sin = (xp.asarray(a) for a in table)
                y = rotate_cuda(part, cos, sin, False)
                close(y, rotary.reference(x, places, BASE))
                exact = x.astype(np.float64)
                close(rotate_cuda(y, cos, sin, True), exact, 8 if x.itemsize > 2 else 2**17)
    assert (
        rotate_cuda(xp.empty((0, 2, 1, 4), np.float32), cos[..., :2], sin[..., :2], True).size == 0
    )
