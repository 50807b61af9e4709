"""layer_norm and rms_norm, forward and backward."""

from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import layer_norm, rms_norm
from mpipar.kernels.device import FLOATS
from mpipar.kernels.norm_cuda import (
    layer_backward_cuda,
    layer_forward_cuda,
    rms_backward_cuda,
    rms_forward_cuda,
)
from tests.cuda.compare import close

TINY: dict[str, list[tuple[int, ...]]] = {
    "float32": [(17, 35), (1, 1032)],
    "bfloat16": [(1, 2, 12)],
}
LARGE = [(4, 129, 1000), (3, 5000), (1000, 3), (4099, 1024)]
EPS = 1e-5


def run(xp: Any, sizes: str) -> None:
    """Compare with the formulas, and gradients with those of the CPU in float64."""
    for number, name in enumerate(FLOATS):
        for shape in TINY.get(name, [(2, 33)]) if sizes == "tiny" else LARGE:
            rng = np.random.default_rng(number)
            x, g = (rng.standard_normal((2, *shape)) + 2).astype(dtype_of(name))
            w, b = rng.standard_normal((2, shape[-1])).astype(dtype_of(name))
            norms(xp, x, g, w, b, sizes == "tiny" and shape[-1] > 1000)
    empty, w = xp.empty((0, 3), np.float32), xp.ones(3, np.float32)
    _, stats = layer_forward_cuda(empty, w, w, EPS)
    _, dw, _ = layer_backward_cuda(empty, empty, w, stats)
    close(dw, np.zeros(3))


def norms(
    xp: Any, x: np.ndarray, g: np.ndarray, w: np.ndarray, b: np.ndarray, only_forward: bool
) -> None:
    """Compare both norms of one x."""
    many = 16 + int(np.sqrt(x.size // x.shape[-1]))  # roundings: of sums over the rows
    wide, grad, scale, shift = (a.astype(np.float64) for a in (x, g, w, b))
    dx, dg, dw, db = (xp.asarray(a) for a in (x, g, w, b))
    y, stats = layer_forward_cuda(dx, dw, db, EPS)
    close(y, layer_norm.reference(x, w, b, EPS), 16)
    y, r = rms_forward_cuda(dx, dw, EPS)
    close(y, rms_norm.reference(x, w, EPS), 16)
    if only_forward:  # its blocks of columns take the simulator long
        return
    _, exact = layer_norm.forward_cpu(wide, scale, shift, EPS)
    wanted = layer_norm.backward_cpu(grad, wide, scale, exact)
    for got, right in zip(layer_backward_cuda(dg, dx, dw, stats), wanted, strict=True):
        close(got, right, many)
    _, inverse = rms_norm.forward_cpu(wide, scale, EPS)
    both = rms_norm.backward_cpu(grad, wide, scale, inverse)
    for got, right in zip(rms_backward_cuda(dg, dx, dw, r), both, strict=True):
        close(got, right, many)
