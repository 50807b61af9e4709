"""Stochastic gradient descent with momentum, in PyTorch's form.

    g  <-  grad_scale * grad + weight_decay * w
    b  <-  momentum * b + g                         (b = g at the first step, as b starts at 0)
    w  <-  w - lr * b                               (without momentum: w - lr * g)

Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum, ICML 2013; the
rate multiplies the whole velocity, so changing it acts at once.
"""

from collections.abc import Iterable
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd import Tensor
from mpipar.kernels.sgd import sgd_step
from mpipar.optim.optimizer import Group, Optimizer, check_range


class SGD(Optimizer):
    """Gradient descent with optional momentum and (coupled) weight decay."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        """Take parameters or groups (see Optimizer); raises ConfigError for values out of range."""
        check_range("momentum", momentum, 0.0)
        self.momentum = momentum
        self.slots = ("momentum",) if momentum else ()
        super().__init__(params, lr, weight_decay, decay_all)

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Take one step for one parameter, in place."""
        sgd_step(
            value,
            grad,
            state.get("momentum"),
            group["lr"],
            self.momentum,
            group["weight_decay"],
            grad_scale,
        )
