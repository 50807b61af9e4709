"""recompute: keep the inputs of a part of the model only, and run the part again in backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).  Of a block that is recomputed,
nothing but its inputs is kept between forward and backward:

    forward    x --f--> y                       f's graph is looked at, and dropped
    backward   x --f--> y, then dy --f'--> dx   on a tape of its own

The look at the graph in forward finds the leaves (parameters) that f uses, so that their hooks fire
after their last use in the whole backward, and whether f ran collectives: then the node counts as
one, and every rank runs f again, in the same order.  `mpipar.rng.place`, the position and the count
of dropout's calls, is taken back, so dropout drops the same elements.
"""

from collections.abc import Callable
from typing import Any

from mpipar import rng
from mpipar.arrays import Array
from mpipar.autograd.engine import run
from mpipar.autograd.record import outputs_of
from mpipar.autograd.tape import Node, Port, Source, Tape, enable_grad, marks, numbers, state
from mpipar.autograd.tensor import Tensor, source_of
from mpipar.errors import GraphError, explain


def recompute(f: Callable[..., Any], *inputs: Any) -> Any:
    """Return f(*inputs), keeping only the inputs; backward runs f again.

    f returns a Tensor or a tuple of Tensors, and gives the same result both times.  Without
    gradients it is simply called.  Raises GraphError if f returns something else.
    """
    if not state.enabled:
        return f(*inputs)
    calls = state.collective_calls
    cuts = [_cut(x) for x in inputs]
    place = rng.place()
    with Tape() as tape:
        result = f(*cuts)
    single = not isinstance(result, tuple)
    outputs = (result,) if single else result
    if not all(isinstance(y, Tensor) for y in outputs):
        names = [type(y).__name__ for y in outputs]
        rule = "what is recomputed must return a Tensor or a tuple of Tensors"
        raise GraphError(explain("recompute", names, rule, "Return Tensors only"))
    collective = state.collective_calls > calls
    datas = [y.data for y in outputs]
    leaves = _leaves([source_of(y) for y in outputs] + tape.collectives, cuts)
    del result, outputs, tape, cuts  # the graph goes; what it used is known
    made = _record(f, inputs, leaves, datas, collective, place)
    return made[0] if single else made


def _cut(x: Any) -> Any:
    """Return a leaf with the data of x, which wants a gradient as x does; others unchanged."""
    return Tensor(x.data, requires_grad=x.requires_grad) if isinstance(x, Tensor) else x


def _leaves(ends: list[Source], inputs: list[Any]) -> list[Tensor]:
    """Return the leaves that the ends of a graph depend on, other than the inputs."""
    found: dict[int, Tensor] = {}
    stack = list(ends)
    mark = next(marks)
    while stack:
        source = stack.pop()
        node = source.node if source.__class__ is Port else source
        if isinstance(node, Tensor):
            found[id(node)] = node
        elif node is not None and node.mark != mark:
            node.mark = mark
            stack.extend(node.inputs)
    for x in inputs:
        found.pop(id(x), None)
    return list(found.values())


def _record(
    f: Callable[..., Any],
    inputs: tuple[Any, ...],
    leaves: list[Tensor],
    datas: list[Array],
    collective: bool,
    place: rng.Place,
) -> tuple[Tensor, ...]:
    """Return the outputs, with a node that runs f again."""
    kept = [_cut(x) for x in inputs]

    def vjp(*grads: Array) -> tuple[Array | None, ...]:
        with enable_grad(), rng.back_at(place), Tape() as tape:
            again = f(*kept)
            outputs = again if isinstance(again, tuple) else (again,)
            roots = [(source_of(y), g) for y, g in zip(outputs, grads, strict=True)]
            del again, outputs
            run(roots, tape, next(numbers), hooks=False)
        own = tuple(x.grad if isinstance(x, Tensor) else None for x in kept)
        return own + (None,) * len(leaves)  # the leaves have got theirs already

    sources = (*[source_of(x) for x in inputs], *leaves)
    if not collective and all(source is None for source in sources):
        return tuple(Tensor(data) for data in datas)
    node = Node(sources, vjp)
    if collective:
        node.collective = True
        state.tape.add(node)
    return outputs_of(node, datas)
