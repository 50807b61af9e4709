"""C = residual + up * activation(op(A) op(B) + bias) [+ C]: matrix products and what follows them.

op transposes the last two dimensions or not; leading dimensions broadcast.  16-bit operands are
multiplied, summed and followed in float32, and C is rounded once.

    NumPy   BLAS (library.py): NumPy's own, or MKL where it is installed (blas.py)
    GPU     tiles in shared memory (simt.py), of float16 and bfloat16 on tensor cores (mma.py; on
            Hopper wgmma.py), with all that follows in the same kernel (epilogue.py); cuBLAS through
            CuPy if asked for
"""

from mpipar.arrays import Array, is_device
from mpipar.errors import ConfigError, explain
from mpipar.kernels.device import simulated
from mpipar.kernels.matmul.cuda import matmul_cuda
from mpipar.kernels.matmul.formula import Task, check, reference
from mpipar.kernels.matmul.library import matmul_library

__all__ = ["IMPLEMENTATIONS", "Task", "matmul", "reference"]

IMPLEMENTATIONS = ("auto", "simt", "mma", "wgmma", "cublas")


def matmul(
    a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False,
    out: Array | None = None, accumulate: bool = False, bias: Array | None = None,
    activation: str | None = None, up: Array | None = None, residual: Array | None = None,
    implementation: str = "auto",
) -> Array:  # fmt: skip
    """Return C (..., m, n), in `out` if given; with `accumulate` it is added to what `out` holds.

    a: (..., m, k), b: (..., k, n), before transposition; bias (n,); activation: None, "gelu" (the
    tanh's) or "silu"; up and residual like C.

    Raises BufferMismatchError for shapes that do not fit, ConfigError for an implementation that
    there is not, or not where the arrays live.
    """
    task = Task(a, b, transpose_a, transpose_b, accumulate, bias, activation, up, residual)
    check(task, out)
    on_device = is_device(a)
    _choose(implementation, on_device, [x for x in (b, out, bias, up, residual) if x is not None])
    if implementation in ("simt", "mma", "wgmma") or (on_device and implementation == "auto"):
        return matmul_cuda(task, out, implementation)
    return matmul_library(task, out)


def _choose(implementation: str, on_device: bool, others: list[Array]) -> None:
    """Raise ConfigError if the implementation is none, or not for where the arrays live."""
    if implementation not in IMPLEMENTATIONS:
        rule = f"it is one of {', '.join(IMPLEMENTATIONS)}"
        raise ConfigError(explain("implementation", implementation, rule, "Choose one of them"))
    if any(is_device(x) != on_device for x in others):
        rule = "all arrays of a product live in one place"
        raise ConfigError(explain("device", "both", rule, "Move the arrays with .get() or asarray"))
    if implementation != "auto" and not (on_device or (simulated() and implementation != "cublas")):
        rule = "it is for arrays on a GPU"
        raise ConfigError(explain("implementation", implementation, rule, 'Leave it at "auto"'))
