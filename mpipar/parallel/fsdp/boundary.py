"""Where a unit begins and ends: before its forward, and before the first node of its backward.

    forward    enter | x ─ unit ─ y ─ boundary ─ y          nodes 4 5 6 | 7
    backward                          boundary: return | dy ─ unit' ─ dx      7 | 6 5 4

The boundary is an identity on the outputs.  Its node is collective, so every backward on every rank
comes by, at the same place among all other collectives and in the same order, also where no
gradient arrives: what it starts, all ranks start.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device
from mpipar.autograd import Function, Tensor, is_grad_enabled
from mpipar.autograd.tensor import is_float
from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Module


class _Boundary(Function):
    """The identity; backward calls `entered` first."""

    collective = True

    @staticmethod
    def forward(ctx: Any, *outputs: Array, entered: Callable[[], None]) -> tuple[Array, ...]:
        """Remember whom to call."""
        ctx.entered = entered
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Array) -> tuple[Array, ...]:
        """Call, and pass the gradients on."""
        ctx.entered()
        return grads


def wrap(
    module: Module,
    enter: Callable[[], Any],
    leave: Callable[[bool], None],
    back: Callable[[Any], None],
    cast: Callable[[Any], Any] | None = None,
) -> None:
    """Let the module's forward call `enter` first and `leave(recorded)` last, backward `back`.

    `back` gets what `enter` has returned.
    cast: what is done to everything among the arguments.  `unwrap` undoes it.
    """
    inner = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        entered = enter()
        if cast is not None:
            args, options = _mapped(args, cast), _mapped(options, cast)
        result = inner(*args, **options)
        recorded = is_grad_enabled()
        leave(recorded)
        if not recorded:
            return result
        return _marked(result, partial(back, entered), type(module).__name__)

    forward.of = "FSDP"  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward


def cast_to(dtype: np.dtype) -> Callable[[Any], Any]:
    """Return a function that converts Tensors and arrays of floating-point numbers."""

    def cast(x: Any) -> Any:
        data = x.data if isinstance(x, Tensor) else x
        is_array = isinstance(data, np.ndarray) or is_device(data)
        return x.astype(dtype) if is_array and is_float(data.dtype) else x

    return cast


def check_free(module: Module) -> None:
    """Raise ConfigError for a module with a forward of its own, which `wrap` would replace."""
    if "forward" in vars(module):
        rule = "a module must be sharded once, and its forward be that of its class"
        fix = "destroy() the other FSDP"
        raise ConfigError(explain("module", type(module).__name__, rule, fix))


def unwrap(module: Module) -> None:
    """Let the module be as it was."""
    module.__dict__.pop("forward", None)


def _marked(result: Any, back: Callable[[], None], name: str) -> Any:
    """Return the result with a boundary behind its Tensors."""
    found: list[Tensor] = []

    def note(x: Any) -> Any:
        if isinstance(x, Tensor):
            found.append(x)
        return x

    _mapped(result, note)
    if not found:
        rule = "a sharded module must return Tensors, so that backward comes by"
        raise ConfigError(explain(f"forward of {name}", type(result).__name__, rule, "Return some"))
    marked = iter(_Boundary.apply(*found, entered=back))
    return _mapped(result, lambda x: next(marked) if isinstance(x, Tensor) else x)


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return x with `change` done to all that is in its tuples, lists and dicts."""
    if isinstance(x, list | tuple):
        items = [_mapped(item, change) for item in x]
        if isinstance(x, list):
            return items
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, dict):
        return {key: _mapped(item, change) for key, item in x.items()}
    return change(x)
