"""The product by the array module's own: BLAS for NumPy, cuBLAS for CuPy."""

from mpipar.arrays import Array, module_of
from mpipar.kernels import gelu, silu
from mpipar.kernels.blocks import widen
from mpipar.kernels.matmul.formula import Task


def matmul_library(task: Task, out: Array | None) -> Array:
    """Return what the task says, in `out` if given: 16-bit numbers in float32, rounded once."""
    xp = module_of(task.a)
    a, b = widen(task.a), widen(task.b)
    a = xp.swapaxes(a, -1, -2) if task.transpose_a else a
    b = xp.swapaxes(b, -1, -2) if task.transpose_b else b
    more = (task.bias, task.activation, task.up, task.residual)
    straight = not task.accumulate and all(x is None for x in more)
    if straight and out is not None and out.dtype == a.dtype == b.dtype:
        return xp.matmul(a, b, out=out)
    v = xp.matmul(a, b)
    if task.bias is not None:
        v += widen(task.bias)
    if task.activation is not None:
        v = (gelu if task.activation == "gelu" else silu).forward(v)
    if task.up is not None:
        v *= widen(task.up)
    if task.residual is not None:
        v += widen(task.residual)
    if out is None:
        return v.astype(task.dtype, copy=False)
    if task.accumulate:
        v += out
    out[...] = v
    return out
