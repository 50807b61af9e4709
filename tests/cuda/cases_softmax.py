"""Softmax and its logarithm, forward and backward; rows with entries of -inf."""

from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import softmax
from mpipar.kernels.device import FLOATS
from mpipar.kernels.softmax_cuda import backward_cuda, forward_cuda
from tests.cuda.compare import close

TINY: dict[str, list[tuple[int, ...]]] = {
    "float32": [(2, 1, 35), (1, 1032)],
    "bfloat16": [(3, 12)],
    "float16": [(1, 1)],
}
LARGE = [(4, 129, 1000), (33, 50_257), (1000, 3), (4099, 1024)]


def run(xp: Any, sizes: str) -> None:
    """Compare with the formula, and gradients with those of the CPU in float64."""
    for number, name in enumerate(FLOATS):
        for shape in TINY.get(name, [(2, 33)]) if sizes == "tiny" else LARGE:
            rng = np.random.default_rng(number)
            x, g = (3 * rng.standard_normal((2, *shape))).astype(dtype_of(name))
            x += x.dtype.type(100)
            for log in (False, True):
                if not log and shape[-1] > 1:
                    x[..., 0] = -np.inf
                    x[..., 32:33] = -np.inf
                elif shape[-1] > 1:
                    x[..., 0] = x[..., 32:33] = 90
                y = forward_cuda(xp.asarray(x), log)
                close(y, softmax.reference(x, log), 16)
                host = y.get() if hasattr(y, "get") else y
                wide = softmax.backward_cpu(g.astype(float), host.astype(float), log)
                close(backward_cuda(xp.asarray(g), y, log), wide, 64)
    empty = xp.empty((0, 3), np.float32)
    assert forward_cuda(empty, False).shape == backward_cuda(empty, empty, True).shape == (0, 3)
