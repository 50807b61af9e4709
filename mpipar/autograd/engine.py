"""Backward: collect the nodes that a loss depends on, and consume them from the last to the first.

Gradients between nodes are plain arrays.  A vjp returns the incoming gradient, a view of it, or a
new array; only a new array (it has no base) may be added to in place.  A node is forgotten before
its vjp runs, so memory falls as backward proceeds.  Nothing recurses.  Cost: about 1 us a node.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.autograd.tape import Node, Port, Source, Tape, marks, state
from mpipar.errors import GraphError, explain

if TYPE_CHECKING:
    from mpipar.autograd.tensor import Tensor


def accumulate(leaf: "Tensor", grad: Array, fresh: bool) -> None:
    """Add `grad` to `leaf.grad`: in place if there is one, else as a new contiguous array.

    The first gradient of a leaf that has a home is written there, and so is the sum with one that
    cannot be written because other processes read it too.
    """
    if leaf.grad is not None:
        if not can_write(leaf.grad):
            home = home_of(leaf)
            leaf.grad = np.add(leaf.grad, grad, out=np.empty_like(grad) if home is None else home)
        else:
            leaf.grad += grad
    elif leaf.hooks and (home := home_of(leaf)) is not None:
        home[...] = grad
        leaf.grad = home
    elif fresh and type(grad) is np.ndarray and grad.flags.c_contiguous:
        leaf.grad = grad
    else:
        leaf.grad = module_of(grad).array(grad, order="C")


def can_write(grad: Array) -> bool:
    """Say whether an array may be written to (a GPU's always)."""
    return bool(getattr(grad.flags, "writeable", True))


def home_of(leaf: "Tensor") -> Array | None:
    """Return the memory that a parameter's gradient shall lie in; None where it is all the same."""
    return getattr(leaf, "home", None)


def deliver(source: Source, grad: Array, fresh: bool) -> None:
    """Add `grad` to what `source` has got so far.  `fresh`: nobody else holds this array."""
    kind = source.__class__
    if kind is Node and source.outputs is None:
        if source.grad is None:
            source.grad, source.owned = grad, fresh
        else:
            source.grad, source.owned = _sum(source.grad, source.owned, grad, fresh), True
    elif kind is Node or kind is Port:
        node, index = (source, 0) if kind is Node else (source.node, source.index)
        if node.grad is None:
            node.grad = [None] * len(node.outputs)
            node.owned = [False] * len(node.outputs)
        if node.grad[index] is None:
            node.grad[index], node.owned[index] = grad, fresh
        else:
            total = _sum(node.grad[index], node.owned[index], grad, fresh)
            node.grad[index], node.owned[index] = total, True
    else:
        accumulate(source, grad, fresh)


def _sum(old: Array, old_owned: bool, new: Array, new_owned: bool) -> Array:
    """Return old + new, in place in one of them if it may be written."""
    if old_owned:
        old += new
        return old
    if new_owned:
        new += old
        return new
    return old + new


def _collect(
    roots: Iterable[Source],
    collectives: list[Node],
    counts: dict[Any, int] | None,
) -> list[Node]:
    """Return the nodes that the roots and the collectives depend on, by ascending number.

    Counts in `counts` how often each leaf with hooks is used by them.

    Raises GraphError if a root depends on a node that an earlier backward consumed.  A collective
    may (one that adds up losses for a log, say): only zeros would go there.
    """
    mark = next(marks)
    found: list[Node] = []
    for stack, strict in ((list(roots), True), (list(collectives), False)):
        while stack:
            node: Any = stack.pop()
            if node.__class__ is Port:
                node = node.node
            elif node.__class__ is not Node:
                if node is not None and counts is not None and node.hooks:
                    counts[node] = counts.get(node, 0) + 1
                continue
            if node.mark == mark:
                continue
            if node.vjp is None:
                if strict:
                    raise _consumed(node)
                continue
            node.mark = mark
            found.append(node)
            stack.extend(node.inputs)
    found.sort(key=attrgetter("number"))
    return found


def _consumed(node: Node) -> GraphError:
    return GraphError(
        explain(
            "backward",
            f"node {node.number}",
            "it must not be used twice, but an earlier backward consumed a part of this graph",
            "Call mpipar.backward(first, second) once for all losses, or run forward again, or "
            ".detach() the value that is reused",
        )
    )


def run(roots: list[tuple[Source, Array]], tape: Tape, number: int, hooks: bool = True) -> None:
    """Run backward from the roots and from the tape's collectives numbered up to `number`.

    roots: pairs (source, gradient).  The gradients are not written to.  With `hooks` False the
    hooks of leaves do not fire, and it has no end: both are for an enclosing backward.  In a
    `Delay` the end comes when that is run.
    """
    around = tuple(state.around) if hooks else ()
    for begin, _ in around:
        begin(all(source is None for source, _ in roots))
    delay = state.delay if hooks else None
    try:
        _run(roots, tape, number, hooks, delay)
    except Exception as error:
        for _, failed in around:
            failed(error)
        raise
    if hooks and delay is None:
        for end in tuple(state.ends):
            end()


def _run(
    roots: list[tuple[Source, Array]], tape: Tape, number: int, hooks: bool, delay: Any
) -> None:
    collectives = tape.up_to(number)
    counts: dict[Any, int] = {}
    if delay is not None:
        delay.begin(counts)
    order = _collect([source for source, _ in roots], collectives, counts if hooks else None)
    if collectives:
        tape.collectives = [node for node in tape.collectives if node.number > number]
    for source, grad in roots:
        if source is not None:
            deliver(source, grad, False)
            used(source, counts)
    before, state.enabled = state.enabled, False
    try:
        _consume(order, counts)
    except BaseException:
        state.failures += 1
        raise
    finally:
        state.enabled = before


def _consume(order: list[Node], counts: dict[Any, int]) -> None:
    """Run the vjps of the nodes from the last to the first; each is forgotten before it runs."""
    pumps, delay = state.pumps, state.delay
    while order:
        node = order.pop()
        grad, vjp, inputs = node.grad, node.vjp, node.inputs
        node.grad = node.vjp = None
        node.inputs = ()
        if node.outputs is not None:
            grad = _complete(node, grad)
        if grad is not None:
            if vjp.__class__ is tuple:
                for source, function in zip(inputs, vjp):  # noqa: B905 (same length, hot)
                    if source is None:
                        continue
                    if delay is not None and source in delay.leaves:
                        delay.add((source,), lambda g, f=function: (f(g),), grad)
                        continue
                    new = function(grad)
                    fresh = new is not grad and new.base is None
                    if source.__class__ is Node and source.outputs is None and source.grad is None:
                        source.grad, source.owned = new, fresh
                    else:
                        deliver(source, new, fresh)
            else:
                news = vjp(*grad) if grad.__class__ is list else vjp(grad)
                for source, new in zip(inputs, news):  # noqa: B905
                    if source is not None and new is not None:
                        deliver(source, new, is_fresh(new, grad))
                news = None
        grad = vjp = new = None
        if counts:
            for source in inputs:
                used(source, counts)
        for pump in pumps:
            pump()


def is_fresh(new: Array, grad: Any) -> bool:
    """Say whether a vjp's result is a new array: it is no view and not what came in."""
    if new.base is not None:
        return False
    return all(new is not g for g in grad) if grad.__class__ is list else new is not grad


def _complete(node: Node, grads: list[Any] | None) -> list[Any] | None:
    """Return the gradients of all outputs, zeros where none arrived; None if it need not run."""
    assert node.outputs is not None
    if grads is None:
        if not node.collective:
            return None
        grads = [None] * len(node.outputs)
    for index, (xp, shape, dtype) in enumerate(node.outputs):
        if grads[index] is None:
            grads[index] = xp.zeros(shape, dtype)
    return grads


def used(source: Source, counts: dict[Any, int]) -> None:
    """Count one use of a leaf less; after the last one its hooks fire, if it has a gradient."""
    if source.__class__ is Node or source.__class__ is Port or source not in counts:
        return
    counts[source] -= 1
    if counts[source] == 0:
        del counts[source]
        if source.grad is not None:
            for hook in tuple(source.hooks):
                hook(source)
