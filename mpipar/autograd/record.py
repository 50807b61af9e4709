"""How an operation becomes a node: the functions that operations end with.

    out = np.exp(x)
    return record(out, (a,), lambda g: g * out)      the vjp keeps `out` and nothing else

Nothing is recorded, and the vjps with what they keep are dropped, where no gradient is wanted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.autograd.tape import Node, Port, Source, Vjp, numbers, state
from mpipar.autograd.tensor import Tensor, check_real, is_float, source_of

_new = object.__new__


def value(x: Any) -> Any:
    """Return an operand as an array or a Python number.

    Python and NumPy scalars stay scalars, so that they never widen the dtype of the array they
    meet; lists become arrays.
    """
    if isinstance(x, Tensor):
        return x.data
    kind = type(x)
    if kind is float or kind is int or kind is bool or kind is np.ndarray:
        return x
    if isinstance(x, np.generic):
        return x.item()
    return x if is_device(x) else np.asarray(x)


def array(x: Any) -> Array:
    """Return an operand as an array."""
    x = x.data if isinstance(x, Tensor) else x
    return x if type(x) is np.ndarray or is_device(x) else np.asarray(x)


def wanted(*inputs: Any) -> bool:
    """Say whether an operation on these inputs will be recorded."""
    return state.enabled and any([source_of(x) is not None for x in inputs])


def wrap(data: Any, node: Any = None) -> Tensor:
    """Return a Tensor for an array without any checks; it wants a gradient if it has a node."""
    out: Tensor = _new(Tensor)
    out.data = data if type(data) is np.ndarray or is_device(data) else np.asarray(data)
    out.node = node
    out.wants = node is not None
    out.grad = out.hooks = None
    return out


def _recorded(data: Any, sources: tuple[Source, ...], vjp: Any) -> Tensor:
    """Return the Tensor of a new node: `wrap(data, Node(sources, vjp))` in one call, for speed."""
    if data.dtype.kind == "c":
        check_real("result", data)
    node: Node = _new(Node)
    node.inputs = sources
    node.vjp = vjp
    node.grad = node.outputs = None
    node.mark = 0
    node.number = next(numbers)
    out: Tensor = _new(Tensor)
    out.data = data if type(data) is np.ndarray or is_device(data) else np.asarray(data)
    out.node = node
    out.wants = True
    out.grad = out.hooks = None
    return out


def record(data: Any, inputs: tuple[Any, ...], vjp: Vjp) -> Tensor:
    """Return the Tensor of an operation with one output, recorded if an input wants a gradient.

    vjp: a function from the gradient of the output to one gradient (or None) for each input: a
    tuple, or the gradient itself if there is one input.
    """
    if state.enabled:
        if len(inputs) == 1:
            x = inputs[0]
            if isinstance(x, Tensor) and x.wants:
                return _recorded(data, (x.node or x,), (vjp,))
        else:
            sources = tuple([source_of(x) for x in inputs])
            if any([source is not None for source in sources]):
                return _recorded(data, sources, vjp)
    return wrap(data)


def record_pair(data: Any, a: Any, vjp_a: Vjp, b: Any, vjp_b: Vjp) -> Tensor:
    """Return the Tensor of an operation whose two inputs have a vjp each.

    The vjp, and what it keeps, of an input that wants no gradient is dropped.
    """
    if state.enabled:
        wants_b = isinstance(b, Tensor) and b.wants
        if isinstance(a, Tensor) and a.wants:
            source = a.node or a
            if wants_b:
                return _recorded(data, (source, b.node or b), (vjp_a, vjp_b))
            return _recorded(data, (source,), (vjp_a,))
        if wants_b:
            return _recorded(data, (b.node or b,), (vjp_b,))
    return wrap(data)


def record_many(datas: Sequence[Array], inputs: tuple[Any, ...], vjp: Vjp) -> tuple[Tensor, ...]:
    """Return the Tensors of an operation with several outputs.

    vjp: a function of one gradient for each output (zeros where none arrived) that returns a tuple.
    """
    sources = tuple([source_of(x) for x in inputs])
    if not state.enabled or all(source is None for source in sources):
        return tuple(wrap(data) for data in datas)
    node = Node(sources, vjp)
    return outputs_of(node, datas)


def outputs_of(node: Node, datas: Sequence[Array]) -> tuple[Tensor, ...]:
    """Return a Tensor for each output of a node; integers want no gradient."""
    node.outputs = tuple((module_of(data), data.shape, data.dtype) for data in datas)
    return tuple(
        wrap(data, Port(node, index) if is_float(data.dtype) else None)
        for index, data in enumerate(datas)
    )
