"""Activations, updates of the optimisers, sums of buffers, casts, and what dropout keeps."""

import warnings
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import adamw, dropout, gelu, reduce, sgd, silu
from mpipar.kernels.adamw_cuda import adamw_step_cuda, sgd_step_cuda
from mpipar.kernels.cast import cast
from mpipar.kernels.device import FLOATS
from mpipar.kernels.dropout_cuda import keep_cuda
from mpipar.kernels.gelu_cuda import backward_cuda as gelu_backward
from mpipar.kernels.gelu_cuda import forward_cuda as gelu_forward
from mpipar.kernels.reduce_cuda import fold_cuda
from mpipar.kernels.silu_cuda import (
    backward_cuda,
    forward_cuda,
    swiglu_backward_cuda,
    swiglu_cuda,
)
from tests.cuda.compare import close

LOOSE = 40  # roundings: of exp and tanh that are fast


def run(xp: Any, sizes: str) -> None:
    """Compare every kernel with its formula, for each number type."""
    n = 7 if sizes == "tiny" else 100_003
    for number, name in enumerate(FLOATS):
        rng = np.random.default_rng(number)
        x, g, up, w = (3 * rng.standard_normal((4, n)).astype(np.float64)).astype(dtype_of(name))
        if n > 4:
            x[:4] = (-60, 60, 0, -12)
        activations(xp, x, g, up)
        updates(xp, w, g, name)
        sums(xp, [x, g, up, w] * 3, sizes)
        for other in FLOATS:
            close(cast(xp.asarray(x), dtype_of(other), 0.5), x.astype(np.float64) / 2, 1)
    masks(xp, n)
    halves = [np.float16([1, 2, 3]), np.float16([0.5, -2, 8])]
    wide = xp.empty(3, np.float32)
    fold_cuda("add", [xp.asarray(a) for a in halves], wide, 2)
    close(wide, reduce.reference(halves, "mean"))
    narrow = xp.empty(3, np.float16)
    fold_cuda("add", [wide, wide], narrow)
    close(narrow, 2 * reduce.reference(halves, "mean"))
    for kind in ("int32", "int64"):
        whole = [np.arange(5, dtype=kind) * k for k in (7, -3, 2)]
        out = xp.empty(5, kind)
        fold_cuda("maximum", [xp.asarray(a) for a in whole], out)
        close(cast_to_float(out), np.max(whole, axis=0).astype(np.float64))


def cast_to_float(x: Any) -> Any:
    """Return integers as float64."""
    return x.astype(np.float64)


def activations(xp: Any, x: np.ndarray, g: np.ndarray, up: np.ndarray) -> None:
    """Compare with the formulas, and gradients with those of the CPU in float64."""
    wide, grad, other = (a.astype(np.float64) for a in (x, g, up))
    dx, dg, dup = (xp.asarray(a) for a in (x, g, up))
    for kind in ("tanh", "none"):
        close(gelu_forward(dx, kind), gelu.reference(x, kind), LOOSE)
        close(gelu_backward(dg, dx, kind), gelu.blocks_cpu(wide, kind, grad), LOOSE)
    close(forward_cuda(dx), silu.reference(x), LOOSE)
    close(backward_cuda(dg, dx), silu.backward_cpu(grad, wide, None)[0], LOOSE)
    close(swiglu_cuda(dx, dup), silu.reference(x, up), LOOSE)
    of_gate, of_up = swiglu_backward_cuda(dg, dx, dup)
    for got, right in zip((of_gate, of_up), silu.backward_cpu(grad, wide, other), strict=True):
        close(got, right, LOOSE)


def updates(xp: Any, w: np.ndarray, g: np.ndarray, name: str) -> None:
    """Take a step of AdamW and of SGD, with and without momentum."""
    wide = np.float64 if name == "float64" else np.float32
    m, v = (0.1 * g).astype(wide), np.abs(g).astype(wide)
    how = (1e-2, 0.9, 0.99, 1e-8, 0.1, 3, 0.5)
    wanted = adamw.reference(w, g, m, v, *how)
    device = [xp.asarray(a.copy()) for a in (w, g, m, v)]
    adamw_step_cuda(*device, *how)
    for got, right in zip((device[0], *device[2:]), wanted, strict=True):
        close(got, right)
    for momentum in (0.0, 0.9):
        buffer = m if momentum else None
        right = sgd.reference(w, g, buffer, 0.1, momentum, 0.01, 0.5)
        param, kept = xp.asarray(w.copy()), None if buffer is None else xp.asarray(buffer.copy())
        sgd_step_cuda(param, xp.asarray(g), kept, 0.1, momentum, 0.01, 0.5)
        close(param, right[0])
        if kept is not None:
            close(kept, right[1])


def sums(xp: Any, operands: list[np.ndarray], sizes: str) -> None:
    """Combine 1, 3 and 12 operands; `out` may be one of them."""
    for op, ufunc in (("sum", "add"), ("max", "maximum"), ("mean", "add"), ("prod", "multiply")):
        for count in (1, 3, 12) if op == "sum" else (3,):
            arrays = [xp.asarray(a.copy()) for a in operands[:count]]
            divisor = count if op == "mean" else 1
            fold_cuda(ufunc, arrays, arrays[-1], divisor)
            close(arrays[-1], reduce.reference(operands[:count], op), 2 * count)


def masks(xp: Any, n: int) -> None:
    """Compare the bits with those of the CPU."""
    index = np.random.default_rng(5).integers(0, 2**63, (n, 1)).astype(np.uint64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # products overflow, as they shall
        for given, shape in ((None, (n, 3)), (index, (n, 2))):
            kept = keep_cuda(shape, 0.4, 2**64 - 59, given)
            host = kept.get() if hasattr(kept, "get") else kept
            np.testing.assert_array_equal(host, dropout.keep_cpu(shape, 0.4, 2**64 - 59, given))
