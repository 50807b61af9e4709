"""What a product is: its operands, and what is done with each sum before it is written."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpipar.arrays import Array
from mpipar.errors import BufferMismatchError, ConfigError, explain

ACTIVATIONS = (None, "gelu", "silu")


@dataclass(frozen=True)
class Task:
    """C = residual + up * activation(op(A) op(B) + bias), and what C held if it accumulates."""

    a: Array  # (..., m, k), or (..., k, m) if transposed
    b: Array  # (..., k, n), or (..., n, k) if transposed
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: bool = False
    bias: Array | None = None  # (n,)
    activation: str | None = None
    up: Array | None = None  # like C
    residual: Array | None = None  # like C

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Return m, n, k."""
        rows, columns = self.a.shape[-2:], self.b.shape[-2:]
        m, k = rows[::-1] if self.transpose_a else rows
        n = columns[-2] if self.transpose_b else columns[-1]
        return m, n, k

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of C."""
        batch = self.a.shape[:-2]
        if batch != self.b.shape[:-2]:
            batch = np.broadcast_shapes(batch, self.b.shape[:-2])
        return (*batch, *self.sizes[:2])

    @cached_property
    def dtype(self) -> np.dtype:
        """Return the dtype of C: the one that A and B have together."""
        a, b = self.a.dtype, self.b.dtype
        return a if a == b else np.promote_types(a, b)


def check(task: Task, out: Array | None) -> None:
    """Raise BufferMismatchError or ConfigError for what does not fit."""
    a, b = task.a, task.b
    shapes = (a.shape, b.shape)
    if a.ndim < 2 or b.ndim < 2 or task.sizes[2] != b.shape[-1 if task.transpose_b else -2]:
        rule = "A is (..., m, k) and B (..., k, n), each after its transposition"
        raise BufferMismatchError(explain("matmul of shapes", shapes, rule, "Reshape one of them"))
    try:
        shape = task.shape
    except ValueError as error:
        rule = "the leading sizes must broadcast"
        text = explain("matmul of shapes", shapes, rule, "Reshape one of them")
        raise BufferMismatchError(text) from error
    if out is not None and out.shape != shape:
        rule = f"the product is {shape}"
        raise BufferMismatchError(explain("out", out.shape, rule, "Pass an array of that shape"))
    if task.bias is not None and task.bias.shape != shape[-1:]:
        rule = f"a bias has an element for each of {shape[-1]} columns"
        raise BufferMismatchError(explain("bias", task.bias.shape, rule, "Check the layer"))
    for name, x in (("up", task.up), ("residual", task.residual)):
        if x is not None and x.shape != shape:
            raise BufferMismatchError(
                explain(name, x.shape, f"the product is {shape}", "Pass an array of that shape")
            )
    if task.accumulate and out is None:
        rule = "a product is added to what `out` holds"
        raise ConfigError(explain("accumulate", True, rule, "Pass out="))
    if task.activation not in ACTIVATIONS:
        rule = 'it is None, "gelu" or "silu"'
        raise ConfigError(explain("activation", task.activation, rule, "Choose one of them"))


def reference(task: Task, out: np.ndarray | None = None) -> np.ndarray:
    """Return C in float64."""
    a, b = task.a.astype(np.float64), task.b.astype(np.float64)
    a = a.swapaxes(-1, -2) if task.transpose_a else a
    v = np.matmul(a, b.swapaxes(-1, -2) if task.transpose_b else b)
    if task.bias is not None:
        v = v + task.bias.astype(np.float64)
    if task.activation == "gelu":
        v = v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
    elif task.activation == "silu":
        v = v / (1 + np.exp(-v))
    if task.up is not None:
        v = v * task.up.astype(np.float64)
    if task.residual is not None:
        v = v + task.residual.astype(np.float64)
    return v if out is None or not task.accumulate else v + out.astype(np.float64)
