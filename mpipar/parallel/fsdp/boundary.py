"""Where a unit begins and ends: before its forward, and before the first node of its backward.

    forward    enter | x ─ unit ─ y ─ boundary ─ y          nodes 4 5 6 | 7
    backward                          boundary: return | dy ─ unit' ─ dx      7 | 6 5 4

The boundary is an identity on the outputs.  Its node is collective, so every backward on every rank
comes by, at the same place among all other collectives and in the same order, also where no
gradient arrives: what it starts, all ranks start.
"""

from collections.abc import Callable
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd import Function, Tensor, is_grad_enabled
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
    enter: Callable[[], None],
    leave: Callable[[bool], None],
    back: Callable[[], None],
    cast: Callable[[Any], Any] | None = None,
) -> None:
    """Let the module's forward call `enter` first and `leave(recorded)` last, backward `back`.

    cast: what is done to every Tensor among the arguments.  `unwrap` undoes it.
    Raises ConfigError if it is wrapped already.
    """
    if "forward" in vars(module):
        rule = "a module must be sharded once, and its forward be that of its class"
        raise ConfigError(
            explain("module", type(module).__name__, rule, "destroy() the other FSDP")
        )
    inner = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        enter()
        if cast is not None:
            args, options = _mapped(args, cast), _mapped(options, cast)
        result = inner(*args, **options)
        recorded = is_grad_enabled()
        leave(recorded)
        return _marked(result, back, type(module).__name__) if recorded else result

    module.__dict__["forward"] = forward


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
