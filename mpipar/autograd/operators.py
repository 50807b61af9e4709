"""The operators and methods of Tensor, attached to the class here, above the operations."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.autograd import elementwise, linear, numpy_calls, reductions, shapes
from mpipar.autograd.numpy_calls import compared
from mpipar.autograd.record import array
from mpipar.autograd.tensor import Tensor


def _swapped(operation: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return the operation with its operands exchanged, for a number or array on the left."""
    return lambda self, other: operation(other, self)


def _reduction(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a reduction; it also takes `axis` and `keepdims`, as NumPy calls them.

    `dtype` and `out`, which `numpy.sum(tensor)` passes on, may only be None.
    """

    def method(
        self: Tensor, dim: Any = None, keepdim: bool = False, *, axis: Any = None,
        keepdims: bool = False, dtype: None = None, out: None = None, **options: Any,
    ) -> Any:  # fmt: skip
        return operation(self, dim if axis is None else axis, keepdim or keepdims, **options)

    method.__doc__ = operation.__doc__
    return method


def _full_transpose(self: Tensor) -> Tensor:
    """Return the tensor with its dimensions in reverse order."""
    return shapes.permute(self, tuple(reversed(range(array(self).ndim))))


def _to_float(self: Tensor) -> Tensor:
    """Return the tensor in float32."""
    return elementwise.astype(self, np.float32)


METHODS: dict[str, Any] = {
    "__array_ufunc__": numpy_calls.ArrayUfunc(),
    "__neg__": elementwise.neg,
    "__pos__": lambda self: self,
    "__abs__": elementwise.abs,
    "__add__": elementwise.add,
    "__radd__": elementwise.add,
    "__sub__": elementwise.sub,
    "__rsub__": _swapped(elementwise.sub),
    "__mul__": elementwise.mul,
    "__rmul__": elementwise.mul,
    "__truediv__": elementwise.div,
    "__rtruediv__": _swapped(elementwise.div),
    "__pow__": elementwise.pow,
    "__rpow__": _swapped(elementwise.pow),
    "__matmul__": linear.matmul,
    "__rmatmul__": _swapped(linear.matmul),
    "__lt__": compared(np.less),
    "__le__": compared(np.less_equal),
    "__gt__": compared(np.greater),
    "__ge__": compared(np.greater_equal),
    "__eq__": compared(np.equal),
    "__ne__": compared(np.not_equal),
    "__getitem__": shapes.index,
    "T": property(_full_transpose),
    "exp": elementwise.exp,
    "log": elementwise.log,
    "sqrt": elementwise.sqrt,
    "tanh": elementwise.tanh,
    "sigmoid": elementwise.sigmoid,
    "abs": elementwise.abs,
    "clip": elementwise.clip,
    "astype": elementwise.astype,
    "to": elementwise.astype,
    "float": _to_float,
    "sum": _reduction(reductions.sum),
    "mean": _reduction(reductions.mean),
    "max": _reduction(reductions.max),
    "min": _reduction(reductions.min),
    "var": _reduction(reductions.var),
    "argmax": _reduction(reductions.argmax),
    "reshape": shapes.reshape,
    "view": shapes.reshape,
    "squeeze": shapes.squeeze,
    "unsqueeze": shapes.unsqueeze,
    "permute": shapes.permute,
    "transpose": shapes.transpose,
    "broadcast_to": shapes.broadcast_to,
    "split": shapes.split,
}

for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)
