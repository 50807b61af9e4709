"""Gradients that are reduced already, while a step reduces what comes on top.

    .grad at the end of a step      R, the same on every rank
    backward begins                 R is set aside; .grad is None
    backward                        .grad is what this rank adds, g0 or g1
    end of the step                 .grad = R + (g0 + g1)

Else R would be a term of every rank's sum.  Clearing a gradient clears what was set aside of it.
A backward whose weights' gradients are put off ends later, and others may begin before that: what
is set aside stays so.
Cost, only where gradients are not cleared between steps: a copy and an addition of them.
"""

from collections.abc import Iterable
from typing import Any

from mpipar.arrays import Array


class SetAside:
    """What the gradients of some parameters were at the end of the last step."""

    def __init__(self) -> None:
        self._reduced: dict[int, Any] = {}  # parameters whose gradient is a result
        self._aside: dict[int, tuple[Any, Array, Array]] = {}  # parameter, gradient, a copy
        self._open = False  # whether a backward has begun that has not ended

    def take(self) -> None:
        """Set aside what is reduced: a backward begins."""
        for key, (param, _, _) in tuple(self._aside.items()):
            if param.grad is None and not self._open:  # cleared since a backward added to it
                del self._aside[key]
        self._open = True
        for key, param in self._reduced.items():
            if param.grad is not None:
                self._aside[key] = (param, param.grad, param.grad.copy())
                param.grad = None
        self._reduced.clear()

    def keep(self) -> None:
        """Go on without a sync: what nothing was added to is in `.grad` again."""
        self._open = False
        for key, (param, grad, _) in tuple(self._aside.items()):
            if param.grad is None:
                param.grad = grad
                self._reduced[key] = param
                del self._aside[key]

    def add(self, params: Iterable[Any]) -> None:
        """Add what was set aside to the gradients, which are results now."""
        self._open = False
        for param, _, copy in self._aside.values():
            if param.grad is not None:
                copy += param.grad
            param.grad = copy
        self._aside.clear()
        self._reduced = {id(param): param for param in params if param.grad is not None}

    def clear(self) -> None:
        """Forget all: the gradients are about to be cleared."""
        self._aside.clear()
        self._reduced.clear()
        self._open = False
