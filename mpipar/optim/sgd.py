"""Stochastic gradient descent with momentum, in PyTorch's form.

    g  <-  grad_scale * grad + weight_decay * w
    b  <-  momentum * b + g                         (b = g at the first step, as b starts at 0)
    w  <-  w - lr * b                               (without momentum: w - lr * g)

Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum, ICML 2013; the
rate multiplies the whole velocity, so changing it acts at once.
"""

from collections.abc import Iterable
from typing import Any

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.autograd import Tensor
from mpipar.kernels.sgd import sgd_step
from mpipar.optim.optimizer import Group, Optimizer


class SGD(Optimizer):
    """Gradient descent with optional momentum and (coupled) weight decay, in PyTorch's form.

    params: parameters, or groups: dicts of "params" and their own lr, momentum or weight_decay.
    lr: the learning rate; `optimizer.lr = ...` sets that of every group.
    momentum: what is kept of the velocity in a step; 0: there is none, and no state.
    weight_decay: times w is added to the gradient of a weight w with two or more global dimensions;
    1-D parameters (biases, norms) do NOT decay, unless
    decay_all: all do, as in PyTorch.  A group that states weight_decay applies it to all of its
    own.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        """Take parameters or groups (see Optimizer); raises ConfigError for values out of range."""
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, settings, decay_all)

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return "momentum" for a group that has some."""
        return ("momentum",) if group["momentum"] else ()

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Take one step for one parameter, in place."""
        momentum = group["momentum"]
        if momentum and "momentum" not in state:  # it was 0 at first
            xp = module_of(value)
            state["momentum"] = xp.zeros(value.shape, compute_dtype(value.dtype))
        velocity, decay = state.get("momentum"), group["weight_decay"]
        sgd_step(value, grad, velocity, group["lr"], momentum, decay, grad_scale)
