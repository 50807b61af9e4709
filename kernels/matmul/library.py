"""The product by a library: BLAS for NumPy (blas.py), cuBLAS for CuPy."""

from mpipar.arrays import Array, is_device, module_of
from mpipar.kernels import gelu, silu
from mpipar.kernels.blocks import widen
from mpipar.kernels.matmul.blas import product
from mpipar.kernels.matmul.formula import Task


def matmul_library(task: Task, out: Array | None) -> Array:
    """Return what the task says, in `out` if given: 16-bit numbers in float32, rounded once."""
    xp = module_of(task.a)
    a, b = widen(task.a), widen(task.b)
    a = xp.swapaxes(a, -1, -2) if task.transpose_a else a
    b = xp.swapaxes(b, -1, -2) if task.transpose_b else b
    more = (task.bias, task.activation, task.up, task.residual)
    alike = out is not None and out.dtype == a.dtype == b.dtype
    if alike and all(x is None for x in more) and _flat(a, b):
        return product(a, b, out, add=task.accumulate)
    if alike and all(x is None for x in more) and not task.accumulate:
        return xp.matmul(a, b, out=out)
    v = product(a, b) if _flat(a, b) and a.dtype == b.dtype else xp.matmul(a, b)
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


def _flat(a: Array, b: Array) -> bool:
    """Say whether these are two matrices on the host."""
    return a.ndim == b.ndim == 2 and not is_device(a)
