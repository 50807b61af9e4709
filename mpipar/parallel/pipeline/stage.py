"""One stage of the model: its forward pass, and its backward pass whole or in two parts.

    F    x --module--> y          on a tape of its own, x cut off from the stage before
    B    dy --> dx                and the weights' gradients, or what they need put off (Delay)
    W    the weights' gradients

Between F and its last use a micro-batch keeps x and the graph of y, not y itself.  Collectives
inside a stage are on the micro-batch's own tape, so that its backward runs them and no others.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.autograd import Delay, Tape, Tensor, is_grad_enabled
from mpipar.autograd.engine import run
from mpipar.autograd.tape import Source, numbers
from mpipar.autograd.tensor import is_float, source_of
from mpipar.errors import ConfigError, DtypeMismatchError, explain

Loss = Callable[..., Any]


@dataclass(slots=True)
class Held:
    """What a micro-batch keeps between its forward pass and its last use."""

    x: Tensor | None  # cut off; None for the first stage
    root: Source  # of the output, or of the loss
    form: tuple[tuple[int, ...], np.dtype]  # of the output, or of the loss
    seed: Array | None  # the gradient of a loss; None for an output
    tape: Tape
    delay: Delay | None = None


class Stage:
    """A module with the micro-batches it has in flight."""

    def __init__(self, number: int, module: Any) -> None:
        """Take stage `number` of the model."""
        self.number, self.module = number, module
        self.held: dict[int, Held] = {}
        self.waits = False  # with the sync of gradients over data ranks, until the step ends
        self.leaves = frozenset(leaves_of(module))
        self._quiet = ExitStack()

    def forward(self, k: int, inputs: tuple[Any, ...], loss: Loss | None) -> Tensor:
        """Run micro-batch k; return the output, or its loss if `loss` makes one of the output.

        inputs: of the model on the first stage, else one array, from which gradients are wanted.
        Raises DtypeMismatchError or ConfigError for an output that is no Tensor, or a loss that is
        no single number.
        """
        keep = is_grad_enabled()
        x = None
        with Tape() as tape:
            if self.number:
                x = Tensor(inputs[0], requires_grad=keep)
                inputs = (x,)
            y = self._checked(self.module(*inputs))
            if loss is not None:
                y = _checked_loss(loss(y))
        if keep:
            seed = None if loss is None else module_of(y.data).ones(y.shape, y.dtype)
            self.held[k] = Held(x, source_of(y), (tuple(y.shape), y.dtype), seed, tape)
        return y

    def backward(self, k: int, grad: Array | None, split: bool) -> Array | None:
        """Run the backward pass of k; return the gradient of its input, None on the first stage.

        grad: of the output; None: one, for a loss.  split: put the weights' gradients off.
        """
        held = self.held[k]
        grad = held.seed if grad is None else grad
        with ExitStack() as stack:
            if split:
                held.delay = stack.enter_context(Delay(self.leaves))
            run([(held.root, grad)], held.tape, next(numbers))
        x, held.x, held.root = held.x, None, None
        if not split:
            del self.held[k]
        if x is None:
            return None
        return module_of(x.data).zeros_like(x.data) if x.grad is None else x.grad

    def weights(self, k: int) -> None:
        """Compute what the backward pass of k put off."""
        delay = self.held.pop(k).delay
        assert delay is not None
        delay.run()

    # -- gradients over data-parallel ranks ------------------------------------------------------

    def quiet(self) -> None:
        """Let backward leave gradients alone, if the module (DataParallel) would sync them."""
        if hasattr(self.module, "no_sync"):
            self._quiet.enter_context(self.module.no_sync())

    def loud(self) -> None:
        """Let the next backward sync gradients again, unless that has to wait."""
        if not self.waits:
            self._quiet.close()

    def sync(self) -> None:
        """Sync the gradients, where that had to wait."""
        self._quiet.close()
        if self.waits:
            self.module.sync_gradients()

    def forget(self) -> None:
        """Drop all micro-batches in flight."""
        self.held.clear()
        self._quiet.close()

    def _checked(self, y: Any) -> Tensor:
        if not isinstance(y, Tensor):
            rule = f"stage {self.number} must return one Tensor"
            raise ConfigError(explain("output", type(y).__name__, rule, "Join what it returns"))
        return y


def leaves_of(module: Any) -> list[Any]:
    """Return the parameters that the operations of a stage use: those below DataParallel, FSDP."""
    return list(getattr(module, "module", module).parameters())


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.size != 1:
        given = tuple(loss.shape) if hasattr(loss, "shape") else type(loss).__name__
        rule = "it must return a Tensor of one element, a term of the loss of the whole batch"
        raise ConfigError(explain("loss_fn", given, rule, "Sum the losses of the micro-batch"))
    if not is_float(loss.dtype):
        rule = "a loss must be floating-point"
        raise DtypeMismatchError(explain("loss.dtype", loss.dtype.name, rule, "Convert it"))
    return loss
