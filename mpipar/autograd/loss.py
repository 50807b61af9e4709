"""Losses: cross-entropy (softmax and negative log-likelihood as one operation), squared error."""

from numbers import Real
from typing import Any

import numpy as np

from mpipar.arrays import Array, beside, compute_dtype, is_device
from mpipar.autograd.record import array, record, record_pair, wanted
from mpipar.autograd.tensor import Tensor, check_float, check_real
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels import cross_entropy as kernel


def cross_entropy(
    logits: Any,
    targets: Any,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross-entropy of logits [..., V] and integer targets [...].

    reduction: "mean" over the targets that are not ignore_index (NaN if there are none), "sum", or
    "none" for [...], zero where ignored.  label_smoothing: the share of the target distribution
    that is spread evenly over all classes, as in PyTorch.  16-bit logits give a float32 loss.

    Raises ConfigError for another reduction, a smoothing outside 0..1 or a target outside 0..V-1,
    BufferMismatchError if the shapes do not belong together, and DtypeMismatchError for logits that
    are integers.
    """
    x, t = array(logits), array(targets)
    _check(x, t, reduction, label_smoothing)
    flat = t.reshape(-1)
    if is_device(x):
        kernel.check(flat, x.shape[-1], ignore_index)
    flat = beside(flat, x)
    losses, slope = kernel.forward(
        x.reshape(-1, x.shape[-1]), flat, label_smoothing, ignore_index, wanted(logits)
    )
    count = 1
    if reduction == "mean":
        count = int((t != ignore_index).sum())
    out = losses.reshape(t.shape) if reduction == "none" else np.add.reduce(losses)
    if reduction == "mean":
        out = out / count if count else out * np.nan

    def vjp(g: Array) -> Array:
        assert slope is not None
        rows = np.broadcast_to(g if reduction == "none" else g / max(count, 1), t.shape)
        dx = kernel.backward(rows.reshape(-1), slope, flat, ignore_index)
        return dx.reshape(x.shape)

    return record(out, (logits,), vjp)


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Return the squared error of input and target, both of one shape [...].

    reduction: "mean" over all elements (NaN if there are none), "sum", or "none" for [...].
    16-bit inputs give a float32 loss.

    Raises ConfigError for another reduction and BufferMismatchError if the shapes differ.
    """
    x, y = array(input), array(target)
    _check_reduction(reduction)
    if x.shape != y.shape:
        raise BufferMismatchError(
            explain("mse_loss of shapes", (x.shape, y.shape), "they must be equal",
                    "Reshape the target: broadcast, each error would count several times")
        )  # fmt: skip
    check_real("mse_loss", x)
    check_real("mse_loss", y)
    away = x.astype(compute_dtype(x.dtype), copy=False) - y.astype(compute_dtype(y.dtype))
    out = away * away
    count = out.size if reduction == "mean" else 1
    if reduction != "none":
        out = np.add.reduce(out, axis=None) / count if count else out.sum() * np.nan

    def vjp_x(g: Array) -> Array:
        return (away * (g * (2 / max(count, 1)))).astype(x.dtype, copy=False)

    def vjp_y(g: Array) -> Array:
        return (away * (g * (-2 / max(count, 1)))).astype(y.dtype, copy=False)

    return record_pair(out, input, vjp_x, target, vjp_y)


def _check_reduction(reduction: str) -> None:
    """Raise ConfigError for a reduction that there is not."""
    if reduction not in ("mean", "sum", "none"):
        rule = 'it must be "mean", "sum" or "none"'
        raise ConfigError(explain("reduction", reduction, rule, "Choose one of them"))


def _check(x: Array, t: Array, reduction: str, smoothing: float) -> None:
    """Raise if the arguments of cross_entropy cannot work."""
    _check_reduction(reduction)
    if not isinstance(smoothing, Real) or not 0 <= smoothing <= 1:
        rule = "it must be between 0 and 1"
        raise ConfigError(explain("label_smoothing", smoothing, rule, "Choose such a number"))
    if not x.ndim or x.shape[:-1] != t.shape or t.dtype.kind not in "iu":
        raise BufferMismatchError(
            explain("cross_entropy of", ((x.shape, x.dtype.name), (t.shape, t.dtype.name)),
                    "logits must be [..., classes], targets integers [...]",
                    "The classes come last: permute the logits if they do not")
        )  # fmt: skip
    check_float("cross_entropy", x)
    if not x.shape[-1]:
        rule = "there must be at least one class"
        raise BufferMismatchError(explain("logits.shape", x.shape, rule, "Classes come last"))
