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
from mpipar.optim.optimizer import Group, Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, PyTorch's AdamW but for what decays.

    params: parameters (`model.parameters()`; of FSDP, after wrapping), or groups: dicts of "params"
    and their own lr, betas, eps or weight_decay.
    lr: the learning rate; `optimizer.lr = ...` sets that of every group.
    betas: of the averages of gradients and of their squares.
    eps: added to the root of the second average.
    weight_decay: each step first takes lr * weight_decay * w from a weight w with two or more
    global dimensions; 1-D parameters (biases, norms) do NOT decay, unless
    decay_all: all do, as in PyTorch.  A group that states weight_decay applies it to all of its
    own.

        optimizer = mp.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
        loss.backward()
        norm = mp.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings, decay_all)

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Take one step for one parameter, in place."""
        self._step(value, grad, state, group, group["weight_decay"], grad_scale)

    def _step(
        self,
        value: Array,
        grad: Array,
        state: dict[str, Array],
        group: Group,
        decay: float,
        grad_scale: float,
    ) -> None:
        beta1, beta2 = group["betas"]
        adamw_step(
            value,
            grad,
            state["m"],
            state["v"],
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            decay,
            int(state["step"][0]),
            grad_scale,
        )


class Adam(AdamW):
    """Adam; weight decay, if any, is added to the gradient (L2 regularisation).

    Arguments are those of AdamW; weight_decay, 0 by default, passes by 1-D parameters too.
    """

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
        self._step(value, grad, state, group, 0.0, grad_scale)
