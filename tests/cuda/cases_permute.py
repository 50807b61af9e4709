"""Changes of layout: packing for an all-to-all, transposes, blocks along any dimension."""

from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels.permute import assign_cuda, reference

# shape, order of the axes
TINY = [
    ((1, 3, 2, 4), (0, 2, 1, 3)), ((2, 5, 3), (0, 2, 1)), ((3, 35), (1, 0)), ((7,), (0,)),
    ((2, 2, 3, 2), (3, 0, 2, 1)), ((2, 1, 3), (1, 0, 2)),
]  # fmt: skip
LARGE = [
    ((4, 1000, 12, 64), (0, 2, 1, 3)), ((3, 1003, 517), (0, 2, 1)), ((4097, 4099), (1, 0)),
    ((16, 48, 40, 24), (3, 0, 2, 1)), ((5, 3, 1001), (1, 0, 2)),
]  # fmt: skip


def run(xp: Any, sizes: str) -> None:
    """Compare with NumPy: every byte."""
    tiny = sizes == "tiny"
    kinds = ("float32", "float16") if tiny else ("float32", "float64", "bfloat16", "uint8")
    for number, (shape, axes) in enumerate(TINY if tiny else LARGE):
        name = kinds[number % len(kinds)]
        x = np.random.default_rng(number).integers(0, 200, shape).astype(dtype_of(name))
        turned = xp.asarray(x).transpose(axes)
        out = xp.empty(turned.shape, x.dtype)
        assign_cuda(out, turned)
        same(out, reference(x, axes))
    for dim, width in ((0, 3), (1, 5), (2, 8), (2, 6)):
        piece = np.arange(3 * 5 * 8, dtype=np.float32).reshape(3, 5, 8)
        taken = piece[(slice(None),) * dim + (slice(0, width),)]
        whole = np.zeros((9, 9, 24), np.float32)
        where = (
            slice(0, taken.shape[0]),
            slice(2, 2 + taken.shape[1]),
            slice(8, 8 + taken.shape[2]),
        )
        device = xp.asarray(whole)
        assign_cuda(device[where], xp.asarray(piece)[(slice(None),) * dim + (slice(0, width),)])
        whole[where] = taken
        same(device, whole)
    empty = xp.empty((0, 3), np.float32)
    assign_cuda(empty, empty)


def same(got: Any, wanted: np.ndarray) -> None:
    """Compare bytes."""
    host = got.get() if hasattr(got, "get") else got
    assert np.ascontiguousarray(host).tobytes() == np.ascontiguousarray(wanted).tobytes()
