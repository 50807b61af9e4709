"""Rotary position embedding on a GPU (the formulas: kernels/rotary.py): a block a position.

x is read by its strides, so that a part of a fused projection needs no copy.
"""

from math import prod

from mpipar.arrays import Array, module_of
from mpipar.kernels.device import cuda, kernel, narrow, widen
from mpipar.kernels.rows_cuda import THREADS, WARP, contiguous


@kernel(
    "T[], W[], W[], T[], int64, int32, int32, int64, int64, int64, int64, W",
    threads=THREADS, fast=False,
)  # fmt: skip
def turn(  # type: ignore[no-untyped-def]
    x, cos, sin, y, seq, heads, half, next_batch, next_row, next_head, next_angles, sign
):  # fmt: skip
    """Write the pairs of one position turned; next_...: steps in x, and in the angles a batch."""
    b, i = cuda.blockIdx.x // seq, cuda.blockIdx.x % seq
    angle, source = b * next_angles + i * half, b * next_batch + i * next_row
    target = (b * seq + i) * heads * half * 2
    for e in range(cuda.threadIdx.x, heads * half, cuda.blockDim.x):
        h, d = e // half, e % half
        at, to = source + h * next_head + d, target + h * (2 * half) + d
        left, right = widen(x[at]), widen(x[at + half])
        c, s = cos[angle + d], sin[angle + d] * sign
        y[to] = narrow(left * c - right * s, y)
        y[to + half] = narrow(right * c + left * s, y)


def rotate_cuda(x: Array, cos: Array, sin: Array, back: bool) -> Array:
    """Return x (B, S, H, D) turned by angles (S, 1, D/2) or (B, S, 1, D/2), or back."""
    batch, seq, heads, dim = x.shape
    cos, sin = contiguous(cos, sin)
    y = module_of(x).empty(x.shape, x.dtype)
    if not y.size:
        return y
    steps = [stride // x.itemsize for stride in x.strides]
    if min(steps) < 0 or steps[3] != 1:
        x = module_of(x).ascontiguousarray(x)
        steps = [prod(x.shape[k + 1 :]) for k in range(4)]
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True))
    flat = module_of(x).lib.stride_tricks.as_strided(x, (span,), (x.itemsize,))
    angles = cos[0].size if cos.ndim == 4 else 0
    threads = min(THREADS, -(-heads * dim // (2 * WARP)) * WARP)
    sizes = (seq, heads, dim // 2, *steps[:3], angles, -1.0 if back else 1.0)
    turn(batch * seq, threads, flat, cos, sin, y, *sizes)
    return y
