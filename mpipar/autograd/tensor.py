"""Tensor: an array and the node that made it.

A Tensor is a leaf (made by the user; it may want a gradient) or the output of a recorded operation.
Operators and methods are attached in `operators.py`, above the operations; `declared.py` lists
them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device, module, module_of
from mpipar.autograd.declared import Declared
from mpipar.autograd.engine import run
from mpipar.autograd.tape import Handle, Port, Source, numbers, state
from mpipar.errors import BufferMismatchError, DtypeMismatchError, GraphError, explain


class Tensor(Declared):
    """An array that remembers how it was computed.

    data: a NumPy or CuPy array (kept, not copied), a Tensor, or what `numpy.asarray` takes.
    requires_grad: whether backward shall leave a gradient in `.grad`, a plain array of the same
    shape and dtype.  A `.grad` that is already there is added to in place.

    The backward of an operation may read `.data` of its inputs, which is not copied: what is
    changed in place between forward and backward gives gradients of the changed values.

    Raises DtypeMismatchError if a gradient is wanted for numbers that are not floating-point, and
    for what is no real number.
    """

    __slots__ = ("__weakref__", "data", "grad", "hooks", "node", "wants")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    data: Array
    grad: Array | None
    hooks: list[Callable[["Tensor"], object]] | None
    node: Any  # the Node or Port that made it; None for a leaf
    wants: bool  # what requires_grad says, without the checks

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        """Make a leaf."""
        if isinstance(data, Tensor):
            data = data.data
        elif not isinstance(data, np.ndarray) and not is_device(data):
            data = np.asarray(data)
        check_real("Tensor", data)
        self.data = data
        self.grad = None
        self.hooks = None
        self.node = None
        self.requires_grad = requires_grad

    @property
    def requires_grad(self) -> bool:
        """Whether backward leaves, or passes on, a gradient here."""
        return self.wants

    @requires_grad.setter
    def requires_grad(self, wants: bool) -> None:
        if wants and not is_float(self.data.dtype):
            raise DtypeMismatchError(
                explain("dtype", self.data.dtype.name, "what has a gradient must be floating-point",
                        'Pass data.astype("float32") or requires_grad=False')
            )  # fmt: skip
        self.wants = bool(wants)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size along each dimension."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.data.size

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made it."""
        return self.node is None

    def backward(self, grad: Any = None) -> None:
        """Add the gradient of this tensor to `.grad` of every leaf that wants one.

        grad: the gradient of this tensor, of its shape; None means one, for a single element.
        Every collective recorded so far runs too, with zeros where no gradient arrives.  On a
        tensor that depends on nothing, backward runs the collectives and nothing else, which is how
        a rank without a loss takes part.  The graph is consumed.

        Raises GraphError if part of the graph was consumed before, or if `grad` is needed, and
        BufferMismatchError if its shape is not that of the tensor.
        """
        backward(self, grads=None if grad is None else (grad,))

    def detach(self) -> "Tensor":
        """Return a leaf that shares the data and wants no gradient."""
        return Tensor(self.data)

    def register_hook(self, function: Callable[["Tensor"], object]) -> Handle:
        """Call `function(tensor)` in each backward, once, when this leaf's gradient is complete.

        Returns a handle with `.remove()`.  Raises GraphError if this is no leaf with a gradient.
        """
        if self.node is not None or not self.requires_grad:
            raise GraphError(
                explain("register_hook", f"a tensor of shape {self.shape}",
                        "it must be a leaf that requires a gradient",
                        "Register it on a parameter, or write a Function")
            )  # fmt: skip
        if self.hooks is None:
            self.hooks = []
        self.hooks.append(function)
        return Handle(self.hooks, function)

    def numpy(self) -> np.ndarray:
        """Return the data as a NumPy array: shared on the CPU, copied from a GPU."""
        return self.data.get() if is_device(self.data) else self.data

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        """Return the data as nested lists."""
        return self.data.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the data for `numpy.asarray`."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the data."""
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Return the DLPack device of the data."""
        return self.data.__dlpack_device__()

    @staticmethod
    def from_dlpack(x: Any) -> "Tensor":
        """Return a leaf that shares memory with `x`, any object with `__dlpack__`."""
        kind = int(x.__dlpack_device__()[0])
        if kind == 2:  # kDLCUDA
            return Tensor(module("cuda").from_dlpack(x))
        return Tensor(np.from_dlpack(x))

    def __repr__(self) -> str:
        """Return the data and whether there is a gradient to come."""
        text = repr(self.data).removeprefix("array(").removesuffix(")")
        wants = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({text}{wants})"

    def __format__(self, spec: str) -> str:
        """Format a single element as a number."""
        return format(self.item() if spec and self.size == 1 else str(self), spec)

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return len(self.data)

    def __bool__(self) -> bool:
        """Return the truth of the only element."""
        return bool(self.data)

    def __float__(self) -> float:
        """Return the only element as a float."""
        return float(self.data.item())

    def __int__(self) -> int:
        """Return the only element as an int."""
        return int(self.data.item())

    def __iter__(self) -> Iterator["Tensor"]:
        """Iterate over the first dimension."""
        return (self[i] for i in range(len(self.data)))


def is_float(dt: np.dtype) -> bool:
    """Say whether numbers of this dtype have gradients (bfloat16 is of kind "V")."""
    return dt.kind == "f" or dt.name == "bfloat16"


def check_float(name: str, *operands: Array) -> None:
    """Raise DtypeMismatchError unless all operands of an operation are floating-point."""
    for data in operands:
        if not is_float(data.dtype):
            rule = "it must be floating-point: numbers of this kind would be rounded off"
            raise DtypeMismatchError(
                explain(f"{name} of dtype", data.dtype.name, rule, 'Pass x.astype("float32")')
            )


def check_real(name: str, data: Any) -> None:
    """Raise DtypeMismatchError for what is no real number; of complex ones no vjp conjugates."""
    if data.dtype.kind in "cOSUMm":
        fix = "Use the real and imaginary part" if data.dtype.kind == "c" else "Convert it"
        rule = "it must hold real numbers"
        raise DtypeMismatchError(explain(f"{name}: dtype", data.dtype.name, rule, fix))


def backward(*losses: Tensor, grads: Sequence[Any] | None = None) -> None:
    """Run backward once from several tensors: the gradients of their sum reach the leaves.

    grads: a gradient for each tensor (None in it: one, for a single element).  Without losses, or
    with constant ones only, all recorded collectives run and nothing else.  The collectives of the
    tape in use run if their number is up to that of the newest loss.

    Raises GraphError and BufferMismatchError as `Tensor.backward` does.
    """
    if grads is None:
        grads = (None,) * len(losses)
    roots = [(source_of(loss), _seed(loss, grad)) for loss, grad in zip(losses, grads, strict=True)]
    ages = [_number(source) for source, _ in roots if source is not None]
    run(roots, state.tape, max(ages) if ages else next(numbers))


def source_of(x: Any) -> Source:
    """Return where a gradient of `x` must go: its node, itself if it is a leaf, or None."""
    if isinstance(x, Tensor) and x.wants:
        return x if x.node is None else x.node
    return None


def _seed(loss: Tensor, grad: Any) -> Array:
    """Return the gradient of a loss as an array of its shape and dtype."""
    data = loss.data
    if grad is None:
        if data.size != 1:
            raise GraphError(
                explain("backward", f"a tensor of shape {data.shape}",
                        "without a gradient it must have a single element",
                        "Sum it, or pass backward(grad=...)")
            )  # fmt: skip
        return module_of(data).ones(data.shape, data.dtype)
    grad = grad.data if isinstance(grad, Tensor) else module_of(data).asarray(grad)
    if grad.shape != data.shape:
        raise BufferMismatchError(
            explain("grad.shape", grad.shape, f"it must be the shape of the tensor, {data.shape}",
                    "Pass a gradient of this shape")
        )  # fmt: skip
    check_real("grad", grad)
    return grad.astype(data.dtype, copy=False)


def _number(source: Source) -> int:
    """Return the number of a source's node; a leaf is as old as the newest node."""
    if isinstance(source, Tensor):
        return next(numbers)
    return source.node.number if source.__class__ is Port else source.number
