"""Adam and AdamW, in PyTorch's form.

    g  <-  grad_scale * grad                        (Adam: + weight_decay * w)
    w  <-  w * (1 - lr * weight_decay)              (AdamW only)
    m  <-  beta1 * m + (1 - beta1) * g
    v  <-  beta2 * v + (1 - beta2) * g^2
    w  <-  w - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

t counts the updates of this parameter.  Kingma and Ba: Adam, ICLR 2015, algorithm 1; Loshchilov and
Hutter: Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2.  The state costs two numbers
a parameter.
"""

from collections.abc import Iterable
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd import Tensor
from mpipar.kernels.adamw import adamw_step
from mpipar.optim.optimizer import Group, Optimizer, check_range


class AdamW(Optimizer):
    """Adam with decoupled weight decay."""

    slots = ("m", "v")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decay_all: bool = False,
    ) -> None:
        """Take parameters or groups (see Optimizer); raises ConfigError for values out of range."""
        check_range("betas[0]", betas[0], 0.0, 1.0)
        check_range("betas[1]", betas[1], 0.0, 1.0)
        check_range("eps", eps, 0.0)
        self.betas = betas
        self.eps = eps
        super().__init__(params, lr, weight_decay, decay_all)

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Take one step for one parameter, in place."""
        self._step(value, grad, state, group["lr"], group["weight_decay"], grad_scale)

    def _step(
        self,
        value: Array,
        grad: Array,
        state: dict[str, Array],
        lr: float,
        decay: float,
        grad_scale: float,
    ) -> None:
        adamw_step(
            value,
            grad,
            state["m"],
            state["v"],
            lr,
            *self.betas,
            self.eps,
            decay,
            int(state["step"][0]),
            grad_scale,
        )


class Adam(AdamW):
    """Adam; weight decay, if any, is added to the gradient (L2 regularisation)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        """Take parameters or groups (see Optimizer); raises ConfigError for values out of range."""
        super().__init__(params, lr, betas, eps, weight_decay, decay_all)

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Take one step for one parameter, in place."""
        decay = group["weight_decay"]
        if decay:
            grad, grad_scale = grad * grad_scale + value * decay, 1.0
        self._step(value, grad, state, group["lr"], 0.0, grad_scale)
