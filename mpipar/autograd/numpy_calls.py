"""What happens when NumPy meets a Tensor: `array + tensor` is ours, `numpy.exp(tensor)` an error.

NumPy asks the TYPE of an operand for `__array_ufunc__`.  A function there gets every ufunc call:
operators with an array or NumPy number on the left go to the operation of the same name, and all
others are refused with what to call instead; NumPy's own refusal says no more than that.  CuPy asks
the OBJECT, and gives its operators up to it where it finds None, so None is what an object shows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.autograd import elementwise, functional, linear
from mpipar.autograd.record import value
from mpipar.errors import DtypeMismatchError, explain


def compared(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    """Return a comparison: a plain boolean array."""
    return lambda a, b: ufunc(value(a), value(b))


OPERATORS: dict[np.ufunc, Callable[[Any, Any], Any]] = {
    np.add: elementwise.add,
    np.subtract: elementwise.sub,
    np.multiply: elementwise.mul,
    np.true_divide: elementwise.div,
    np.power: elementwise.pow,
    np.matmul: linear.matmul,
    **{
        ufunc: compared(ufunc)
        for ufunc in (
            np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal,
        )
    },
}  # fmt: skip
NAMES = {"absolute": "abs", "negative": "neg"}  # where ours is another than NumPy's


class ArrayUfunc:
    """`__array_ufunc__` of Tensor: the function below on the type, None on its objects."""

    def __get__(self, instance: object, owner: type) -> Callable[..., Any] | None:
        """Return what NumPy, or CuPy, shall find."""
        return called if instance is None else None


def called(tensor: Any, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Run an operator; raise DtypeMismatchError, a TypeError, for any other call of a ufunc."""
    operation = OPERATORS.get(ufunc)
    if operation is not None and method == "__call__" and not options:
        return operation(*inputs)
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    rule, fix = _advice(name, options)
    raise DtypeMismatchError(explain(f"numpy.{name} of a Tensor of shape", tensor.shape, rule, fix))


def _advice(name: str, options: dict[str, Any]) -> tuple[str, str]:
    """Return the rule that a call breaks, and what to do."""
    if "out" in options:
        rule = "what is added to an array in place must be an array"
        return rule, "Write a = a + tensor, or use tensor.data, which has no gradient"
    rule = "a function of Tensors must be one that is recorded"
    ours = NAMES.get(name, name)
    what = f"mp.functional.{ours}" if hasattr(functional, ours) else "mp.functional"
    return rule, f"Use {what} or a method of Tensor; or pass tensor.data, which has no gradient"
