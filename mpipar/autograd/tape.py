"""The graph that forward builds: nodes in append order, and what is global about recording.

Every recorded operation is a `Node` with a number; numbers grow, so descending order is a reverse
topological order and no recursion is needed anywhere.  A Tensor owns its node and a node owns what
its inputs came from, so a graph that nobody holds is freed; a `Tape` holds only the nodes of
COLLECTIVE operations, which run in every backward on every rank:

    rank 0:  x -linear-> h -all_reduce-> y -sum-> loss   loss.backward(): sum, all_reduce, linear
    rank 1:  x -linear-> h -all_reduce-> y               Tensor(0.).backward(): all_reduce, linear

What is recorded stays until a backward runs it: no rank may drop a collective alone, as others may
wait for it there.  So whatever is not to be trained is computed under `no_grad`.

Wengert's list (1964), as in Griewank and Walther, Evaluating Derivatives, chapter 3.  `engine.py`
runs it backward.

The switch for recording, the tape in use, and what is called during and after backward belong to
the thread that sets them.  Numbers are counted over all threads, so a graph may be passed on to
another thread; but a leaf, or a graph, is for one thread at a time.
"""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

Vjp = Callable[..., Any]
Source = Any  # a Node, a Port, a leaf Tensor, or None where no gradient is wanted
MANY = 10_000  # collectives that wait for a backward; more of them look like a forgotten no_grad
numbers = count(1)  # of nodes, and of the moments that lie between them
marks = count(1)  # of walks through a graph
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class PendingCollectivesWarning(RuntimeWarning):
    """Very many collectives were recorded and no backward has run them."""


class Node:
    """One recorded operation: where its inputs came from, and how a gradient gets to them.

    `vjp` is a tuple of functions, one for each input, or one function that returns a tuple of
    gradients, one for each input.  It is None once backward has consumed the node.  A node with
    `outputs` (module, shape, dtype of each) has several outputs or is collective: its `grad` and
    `owned` are lists, and outputs without a gradient get zeros.
    """

    __slots__ = (
        "__weakref__", "collective", "grad", "inputs", "mark", "number", "outputs", "owned", "vjp",
    )  # fmt: skip

    def __init__(self, inputs: tuple[Source, ...], vjp: Any) -> None:
        """Append a node for an operation with one output."""
        self.inputs = inputs
        self.vjp = vjp
        self.grad: Any = None
        self.owned: Any = False  # says of a gradient whether it may be added to in place
        self.mark = 0
        self.outputs: tuple[tuple[Any, tuple[int, ...], np.dtype], ...] | None = None
        self.collective = False
        self.number = next(numbers)


class Port:
    """One output of a node that has several."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int) -> None:
        """Name output `index` of `node`."""
        self.node = node
        self.index = index


class Tape:
    """The collective nodes recorded and not yet run.

    While gradients are on, every collective is recorded and stays here, with the graph below it,
    until the next backward, which runs them all in reverse order on every rank.  None can be left
    out on one rank alone: the others would wait for it.  So evaluation, sampling and logging belong
    under `no_grad`, or the next backward sends a message for each of their collectives.  Above
    10,000 of them there is one PendingCollectivesWarning a thread.

    As a context manager it is the tape in use inside the block: backward there runs the collectives
    of this tape only.  A pipeline gives each micro-batch in flight its own.
    """

    def __init__(self) -> None:
        """Make an empty tape."""
        self.collectives: list[Node] = []
        self._outer: list[Tape] = []

    def __enter__(self) -> "Tape":
        """Record on this tape from here on."""
        self._outer.append(state.tape)
        state.tape = self
        return self

    def __exit__(self, *error: object) -> None:
        """Go back to the tape that was in use before."""
        state.tape = self._outer.pop()

    def add(self, node: Node) -> None:
        """Keep a collective node until a backward runs it."""
        self.collectives.append(node)
        if len(self.collectives) > MANY and not state.warned:
            state.warned = True
            warnings.warn(
                f"more than {MANY} collectives are recorded and no backward has run them: the next "
                "one will run them all, and until then their memory is held. Evaluate under "
                "mp.no_grad()",
                PendingCollectivesWarning,
                stacklevel=_depth_of_caller(),
            )

    def clear(self) -> None:
        """Forget the recorded collectives: no backward will run them.

        All ranks that took part in them must do so.
        """
        self.collectives.clear()

    def up_to(self, number: int) -> list[Node]:
        """Return the recorded collectives with at most this number."""
        return [node for node in self.collectives if node.number <= number]


class State(threading.local):
    """What each thread has: the switch, the tape in use, and who is called in backward."""

    def __init__(self) -> None:
        """Start with recording on and an empty tape; runs at a thread's first use."""
        self.enabled = True
        self.collective_calls = 0  # recorded or not
        self.pumps: list[Callable[[], object]] = []
        self.ends: list[Callable[[], object]] = []
        self.around: list[tuple[Callable[[bool], object], Callable[[Exception], object]]] = []
        self.tape = Tape()
        self.delay: Any = None  # the Delay that backward puts gradients off in
        self.warned = False  # of many collectives
        self.failures = 0  # backwards that ended with an exception


state = State()


def _depth_of_caller() -> int:
    """Return the stacklevel, for our caller, of the newest frame that is not of this package."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, depth = frame.f_back, depth + 1
    return depth


def is_grad_enabled() -> bool:
    """Say whether operations are being recorded."""
    return state.enabled


def failures() -> int:
    """Return how many of this thread's backwards have ended with an exception."""
    return state.failures


def start_afresh() -> None:
    """Forget what this thread has recorded, and who is called in its backwards.

    For a thread whose graph can never be run: ranks that it communicates with are gone.
    """
    state.__init__()  # type: ignore[misc]


class no_grad(contextlib.ContextDecorator):
    """Context manager and decorator: operations inside are not recorded.

    Evaluate under it.  A collective that is called outside is recorded, runs again in the next
    backward and holds its graph until then (see Tape).
    """

    def __init__(self) -> None:
        """Prepare; nothing is switched yet."""
        self._before: list[bool] = []

    def _recreate_cm(self) -> "no_grad":
        """Return what a call of a decorated function enters: one of its own, for its thread."""
        return no_grad()

    def __enter__(self) -> "no_grad":
        """Switch recording off."""
        self._before.append(state.enabled)
        state.enabled = False
        return self

    def __exit__(self, *error: object) -> None:
        """Switch back to what was before."""
        state.enabled = self._before.pop()


@contextlib.contextmanager
def enable_grad() -> Iterator[None]:
    """Record the operations in the block, also inside `no_grad`."""
    before, state.enabled = state.enabled, True
    try:
        yield
    finally:
        state.enabled = before


class Handle:
    """What `register_hook` and `add_pump` return."""

    def __init__(self, functions: list[Any], function: Any) -> None:
        """Remember which function stands in which list."""
        self._functions, self._function = functions, function

    def remove(self) -> None:
        """Take the function out of use.  A second call does nothing."""
        with contextlib.suppress(ValueError):
            self._functions.remove(self._function)


def add_pump(function: Callable[[], object]) -> Handle:
    """Call `function` between the nodes of this thread's backwards: communication advances.

    Returns a handle with `.remove()`.
    """
    state.pumps.append(function)
    return Handle(state.pumps, function)


def after_backward(function: Callable[[], object]) -> Handle:
    """Call `function` at the end of this thread's backwards, when all gradients are in place.

    One that runs inside another, as `recompute` does, has no end of its own.
    Returns a handle with `.remove()`.
    """
    state.ends.append(function)
    return Handle(state.ends, function)


def around_backward(
    begin: Callable[[bool], object], failed: Callable[[Exception], object]
) -> Handle:
    """Call `begin` before this thread's backwards, and `failed` if one of them raises.

    begin is told whether the backward has no loss that wants a gradient; failed gets the error,
    which goes on after it.  A backward that failed has no end.
    Returns a handle with `.remove()`.
    """
    entry = (begin, failed)
    state.around.append(entry)
    return Handle(state.around, entry)
