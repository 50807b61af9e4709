"""Elementwise operations with NumPy's broadcasting, and their vjps.

A vjp maps the gradient of the output to that of one input, in the output's shape; `binary` undoes
the broadcasting: the gradient of an input that was repeated is the sum over the repetitions.

    (3, 1) + (4,) -> (3, 4)      gradients: sum over dim 1 with keepdim; sum over dim 0

Python and NumPy scalars keep the dtype of the tensor.  16-bit numbers are computed in float32 and
rounded once.  Comparisons give plain boolean arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar import arrays
from mpipar.arrays import Array, compute_dtype, is_sixteen_bit
from mpipar.autograd.record import array, record, record_pair, value, wrap
from mpipar.autograd.tensor import Tensor, check_real, is_float
from mpipar.errors import BufferMismatchError, DtypeMismatchError, explain

Operand = Any  # a Tensor, an array, or a number
_PLAIN = (np.dtype(np.float32), np.dtype(np.float64))


def unbroadcast(grad: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return the gradient of an operand of this shape and dtype that was broadcast to grad's."""
    if grad.shape != shape:
        extra = grad.ndim - len(shape)
        repeated = tuple(range(extra)) + tuple(
            extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1
        )
        grad = np.add.reduce(grad, axis=repeated, dtype=compute_dtype(grad.dtype)).reshape(shape)
    return grad if grad.dtype == dtype else grad.astype(dtype)


def binary(
    name: str,
    ufunc: Callable[[Any, Any], Array],
    a: Operand,
    x: Any,
    vjp_a: Callable[[Array], Array],
    b: Operand,
    y: Any,
    vjp_b: Callable[[Array], Array],
) -> Tensor:
    """Record out = ufunc(x, y); x and y are the values of a and b, the vjps give out's shape."""
    try:
        out = ufunc(x, y)
    except (TypeError, ValueError) as error:
        raise _refused(name, x, y, error) from error
    if not (
        x.__class__ is np.ndarray
        and out.dtype in _PLAIN
        and (
            (x.dtype is y.dtype and x.shape == y.shape)
            if y.__class__ is np.ndarray
            else x.dtype is out.dtype
        )
    ):  # most operations meet equal shapes and dtypes and skip this
        check_real(name, out)
        out = _keep_sixteen(out, x, y)
        vjp_a, vjp_b = _fit(vjp_a, x, out), _fit(vjp_b, y, out)
    return record_pair(out, a, vjp_a, b, vjp_b)


def unary(a: Operand, x: Array, out: Array, vjp: Callable[[Array], Array]) -> Tensor:
    """Record out, a function of a alone, whose value is x; `vjp` gets and gives float32 or more."""
    if x.dtype.itemsize == 2:
        out, vjp = out.astype(x.dtype, copy=False), _fit(vjp, x, out)
    return record(out, (a,), vjp)


def _fit(vjp: Callable[[Array], Array], x: Any, out: Array) -> Callable[[Array], Array]:
    """Return the vjp, followed by what undoes the broadcast or cast from x to out, if any.

    Around 16-bit numbers the vjp works in float32, and its result is rounded once.
    """
    if not hasattr(x, "dtype"):
        return vjp  # a Python number: nothing will call it
    shape, dtype = x.shape, x.dtype
    if dtype is out.dtype and shape == out.shape and dtype.itemsize > 2:
        return vjp
    wide = compute_dtype(out.dtype)
    return lambda g: unbroadcast(vjp(g.astype(wide, copy=False)), shape, dtype)


def _keep_sixteen(out: Array, x: Any, y: Any) -> Array:
    """Return out in the 16-bit dtype of the array operand, if a Python number widened it."""
    if hasattr(x, "dtype") == hasattr(y, "dtype"):
        return out
    dtype = (x if hasattr(x, "dtype") else y).dtype
    return out.astype(dtype) if is_sixteen_bit(dtype) else out


def _refused(name: str, x: Any, y: Any, error: Exception) -> Exception:
    """Return the error for operands that NumPy refused: mostly shapes that do not broadcast."""
    try:
        np.broadcast_shapes(np.shape(x), np.shape(y))
    except ValueError:
        return _mismatch(name, x, y)
    kinds = tuple([str(getattr(v, "dtype", type(v).__name__)) for v in (x, y)])
    rule = f"NumPy must be able to compute it, but {error}"
    return DtypeMismatchError(
        explain(f"{name} of", kinds, rule, 'Convert to floating-point: .astype("float32")')
    )


def _mismatch(name: str, x: Any, y: Any) -> BufferMismatchError:
    """Return the error for two shapes that do not broadcast."""
    return BufferMismatchError(
        explain(f"{name} of shapes", (np.shape(x), np.shape(y)), "they must broadcast together",
                "Make dimensions, counted from the last, equal or 1")
    )  # fmt: skip


def _same(g: Array) -> Array:
    return g


def add(a: Operand, b: Operand) -> Tensor:
    """Return a + b."""
    return binary("add", np.add, a, value(a), _same, b, value(b), _same)


def sub(a: Operand, b: Operand) -> Tensor:
    """Return a - b."""
    return binary("sub", np.subtract, a, value(a), _same, b, value(b), np.negative)


def mul(a: Operand, b: Operand) -> Tensor:
    """Return a * b."""
    x, y = value(a), value(b)
    return binary("mul", np.multiply, a, x, lambda g: g * y, b, y, lambda g: g * x)


def div(a: Operand, b: Operand) -> Tensor:
    """Return a / b."""
    x, y = value(a), value(b)
    return binary("div", np.true_divide, a, x, lambda g: g / y, b, y, lambda g: -(g * x) / y / y)


def pow(a: Operand, b: Operand) -> Tensor:
    """Return a ** b.  The gradient of b is 0 where a is 0, and NaN where a is negative."""
    x, y = value(a), value(b)

    def vjp_a(g: Array) -> Array:
        if not hasattr(y, "shape"):
            return g * (y * x ** (y - 1)) if y != 0 else g * 0
        return g * y * x ** np.where(y == 0, 1, y - 1)

    def vjp_b(g: Array) -> Array:
        if not hasattr(x, "dtype"):
            return g * x**y * (math.log(x) if x > 0 else math.nan if x else 0)
        return g * x**y * np.log(np.where(x == 0, 1, x))

    return binary("pow", np.power, a, x, vjp_a, b, y, vjp_b)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of a and b; on a tie each gets half of the gradient."""
    return _extreme("maximum", np.maximum, np.greater, np.greater_equal, a, b)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of a and b; on a tie each gets half of the gradient."""
    return _extreme("minimum", np.minimum, np.less, np.less_equal, a, b)


def _extreme(name: str, ufunc: Any, wins: Any, ties: Any, a: Operand, b: Operand) -> Tensor:
    x, y = value(a), value(b)
    return binary(
        name, ufunc,
        a, x, lambda g: 0.5 * (g * wins(x, y) + g * ties(x, y)),
        b, y, lambda g: 0.5 * (g * wins(y, x) + g * ties(y, x)),
    )  # fmt: skip


def _number_like(x: Any, y: Any) -> Any:
    """Return x, or a Python number x in the dtype of the float array y."""
    if hasattr(x, "dtype") or not hasattr(y, "dtype") or not is_float(y.dtype):
        return x
    return y.dtype.type(x)


def where(condition: Any, a: Operand, b: Operand) -> Tensor:
    """Return a where `condition` (booleans) is true, else b.  All three broadcast together."""
    c, x, y = array(condition), value(a), value(b)
    x, y = _number_like(x, y), _number_like(y, x)
    try:
        out = _keep_sixteen(np.where(c, x, y), x, y)
    except ValueError as error:
        shapes = (c.shape, np.shape(x), np.shape(y))
        rule, fix = "they must broadcast together", "Make dimensions, from the last, equal or 1"
        raise BufferMismatchError(explain("where of shapes", shapes, rule, fix)) from error
    check_real("where", out)
    return record_pair(
        out,
        a, _fit(lambda g: np.where(c, g, g.dtype.type(0)), x, out),
        b, _fit(lambda g: np.where(c, g.dtype.type(0), g), y, out),
    )  # fmt: skip


def clip(a: Operand, low: Any = None, high: Any = None) -> Tensor:
    """Return a limited to [low, high]; the gradient passes where a is inside, bounds included.

    A bound is a number, or an array or Tensor that broadcasts with a; where a lies outside, the
    gradient goes to the bound.
    """
    x = array(a)
    bounds = [None if bound is None else value(bound) for bound in (low, high)]
    for bound in bounds:
        if hasattr(bound, "dtype"):
            check_real("clip", bound)
    if is_float(x.dtype) and any(hasattr(bound, "dtype") for bound in bounds):
        return _clip_by_arrays(a, low, high)
    low, high = bounds

    def vjp(g: Array) -> Array:
        if low is not None:
            g = g * (x >= low)
        return g if high is None else g * (x <= high)

    return unary(a, x, np.clip(x, low, high).astype(x.dtype, copy=False), vjp)


def _clip_by_arrays(a: Operand, low: Any, high: Any) -> Tensor:
    """Return clip(a, low, high) for float a and bounds that are arrays."""
    out, dtype = a, array(a).dtype
    for bound, outside in ((low, np.less), (high, np.greater)):
        if bound is not None:
            bound = astype(bound, dtype) if hasattr(value(bound), "dtype") else bound
            try:
                beyond = outside(value(out), value(bound))
            except ValueError as error:
                raise _mismatch("clip", value(out), value(bound)) from error
            out = where(beyond, bound, out)
    return out if isinstance(out, Tensor) else wrap(array(out))


def neg(a: Operand) -> Tensor:
    """Return -a."""
    return record(np.negative(array(a)), (a,), np.negative)


def exp(a: Operand) -> Tensor:
    """Return e ** a."""
    x = array(a)
    y = np.exp(x)
    return unary(a, x, y, lambda g: g * y)


def log(a: Operand) -> Tensor:
    """Return the natural logarithm of a."""
    x = array(a)
    return unary(a, x, np.log(x), lambda g: g / x)


def sqrt(a: Operand) -> Tensor:
    """Return the square root of a."""
    x = array(a)
    y = np.sqrt(x)
    return unary(a, x, y, lambda g: 0.5 * g / y)


def tanh(a: Operand) -> Tensor:
    """Return the hyperbolic tangent of a."""
    x = array(a)
    y = np.tanh(x)
    return unary(a, x, y, lambda g: g - g * y * y)


def sigmoid(a: Operand) -> Tensor:
    """Return 1 / (1 + e ** -a), through tanh so that nothing overflows."""
    x = array(a)
    y = 0.5 * np.tanh(0.5 * x) + 0.5
    return unary(a, x, y, lambda g: g * y - g * y * y)


def relu(a: Operand) -> Tensor:
    """Return a where it is positive, else 0; the gradient at 0 is 0."""
    x = array(a)
    return unary(a, x, np.maximum(x, x.dtype.type(0)), lambda g: g * (x > 0))


def abs(a: Operand) -> Tensor:
    """Return the absolute value of a; its gradient at 0 is 0."""
    x = array(a)
    return unary(a, x, np.abs(x), lambda g: g * np.sign(x))


def astype(a: Operand, dtype: Any) -> Tensor:
    """Return a in another dtype: a name ("bfloat16" included) or a NumPy dtype.

    There is no gradient through integers.  Raises DtypeMismatchError for what is no dtype.
    """
    x, before = array(a), array(a).dtype
    try:
        target = arrays.dtype(dtype)
    except TypeError as error:
        rule = "it must be a dtype, or the name of one"
        fix = 'Pass "float32", "float64", "bfloat16", "float16", "int64" or a NumPy dtype'
        raise DtypeMismatchError(explain("dtype", dtype, rule, fix)) from error
    check_real("astype", np.empty(0, target))
    out = x.astype(target, copy=False)
    if not is_float(target):
        return wrap(out)
    return record(out, (a,), lambda g: g.astype(before, copy=False))
