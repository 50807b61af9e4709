"""gradcheck: compare a gradient with finite differences along a random direction.

For outputs y = f(x), random u (one for each output) and random v (for one input), backward gives
g = gradient of <u, y>, and both numbers below are the derivative along v:

    <g, v>     and     (<u, f(x + eps v)> - <u, f(x - eps v)>) / (2 eps)

Two evaluations of f an input, whatever its size (HIPS autograd, test_util).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar import rng
from mpipar.arrays import Array
from mpipar.autograd.record import array
from mpipar.autograd.tape import enable_grad, no_grad
from mpipar.autograd.tensor import Tensor, backward, is_float
from mpipar.errors import GraphError, explain


def _same(total: float) -> float:
    return total


def gradcheck(
    f: Callable[..., Any],
    inputs: Any,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
    total: Callable[[float], float] = _same,
) -> bool:
    """Return True if backward through f agrees with finite differences, in float64.

    f: a function of Tensors that returns a Tensor or a tuple of Tensors.  It must give the same
    result for the same inputs, and be smooth within eps of them.
    inputs: a Tensor or array, or a sequence of them; those of floating-point numbers are
    differentiated, as float64 copies; others are passed on.
    total: how a number is summed over the ranks of a group, if f communicates; then `seed` differs
    by rank, and what is checked is the gradient of the sum of all ranks' results.

    Raises GraphError naming the input, the expected and the received derivative.
    """
    given = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    points = [_point(x) for x in given]
    directions = np.random.default_rng(seed)
    with enable_grad():
        leaves = [Tensor(x, requires_grad=True) if _is_point(x) else x for x in points]
        outputs = [y for y in _outputs(f, leaves) if is_float(y.dtype)]
        weights = [np.asarray(directions.standard_normal(y.shape)) for y in outputs]
        backward(*outputs, grads=weights)
    for number, leaf in enumerate(leaves):
        if _is_point(points[number]):
            v = np.asarray(directions.standard_normal(leaf.shape))
            _compare(f, points, number, v, weights, leaf.grad, (eps, rtol, atol), total)
    return True


def _compare(
    f: Callable[..., Any],
    points: list[Any],
    number: int,
    v: np.ndarray,
    weights: list[np.ndarray],
    grad: Array | None,
    tolerance: tuple[float, float, float],
    total: Callable[[float], float],
) -> None:
    """Raise GraphError unless the derivative by input `number` along v is what grad says."""
    eps, rtol, atol = tolerance
    sides = []
    for step in (eps, -eps):
        moved = list(points)
        moved[number] = points[number] + step * v
        with no_grad():
            tensors = [Tensor(x) if _is_point(x) else x for x in moved]
            outputs = [y.data for y in _outputs(f, tensors) if is_float(y.dtype)]
        sides.append(math.fsum(_dot(u, y) for u, y in zip(weights, outputs, strict=True)))
    expected = total((sides[0] - sides[1]) / (2 * eps))
    got = total(_dot(grad, v) if grad is not None else 0.0)
    scale = math.sqrt(sum(u.size for u in weights))
    if not abs(expected - got) <= atol * max(1.0, scale) + rtol * abs(expected):
        raise GraphError(
            explain(
                f"gradcheck, input {number} of shape {v.shape}",
                got,
                f"the derivative must be that of finite differences, {expected!r}",
                "Check the vjp, or that f is smooth and deterministic at these inputs",
            )
        )


def _point(x: Any) -> Any:
    """Return the float64 copy of an input that is differentiated; another input itself."""
    if isinstance(x, Tensor) or (hasattr(x, "dtype") and hasattr(x, "shape")):
        data = array(x)
        return data.astype(np.float64) if is_float(data.dtype) else x
    return np.float64(x) * np.ones(()) if isinstance(x, float) else x


def _is_point(x: Any) -> bool:
    return not isinstance(x, Tensor) and getattr(x, "dtype", None) == np.float64


def _outputs(f: Callable[..., Any], inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Return f(*inputs) as a sequence of Tensors; dropout drops the same elements in every call."""
    with rng.back_at(rng.place()):
        result = f(*inputs)
    return result if isinstance(result, tuple | list) else (result,)


def _dot(u: Array, y: Array) -> float:
    """Return the sum of products, leaving out what is not finite in y."""
    return float(np.sum(u * np.where(np.isfinite(y), y, 0)))
