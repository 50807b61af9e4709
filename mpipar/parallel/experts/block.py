"""Experts in the place of a model's MLP: `MoE` with what training needs besides.

    x (B, S, C) ── route, experts ── y ── add the balance loss's gradient ── y

The balance loss of a layer never travels to where the loss is computed, which may be another stage
of a pipeline.  Instead the layer's output passes through an identity whose backward hands the
balance loss its gradient, a number that is known beforehand:

    loss = cross entropy + balance * sum over layers, micro-batches of (share of tokens) * B

B is the balance loss of a micro-batch, over all ranks that hold tokens of it.  This is the
MoEAuxLossAutoScaler of Megatron-Core.

An expert that is full takes the first of its tokens by global row and position, so that the layout
does not change which are dropped.  In eval() none are.

With sequence parallelism a block of the sequence is gathered first, and cut out of the result: an
expert's tokens are then the same on all ranks of tp, each of which has a part of its matrices.
"""

from typing import Any

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, module_of
from mpipar.autograd import Function, Tensor, is_grad_enabled
from mpipar.nn.dropout import row_index
from mpipar.parallel.experts.moe import MoE
from mpipar.parallel.replicated import gather_from, scatter_to
from mpipar.parallel.tensor.sequence import SequenceShards


class ExpertBlock(MoE):
    """The layer, called with x (B, S, C) and the positions (S,) or (B, S) of its tokens.

    balance_per_token: what the balance loss counts, times the number of tokens it is the mean of;
    set before every step to balance / (tokens of the step).  0: not at all.
    """

    balance_per_token = 0.0

    def __init__(self, *sizes: Any, sequence: SequenceShards | None = None, **settings: Any):
        """Take the arguments of MoE.  sequence: how blocks of it are cut, where x is one."""
        super().__init__(*sizes, **settings)
        self.sequence = sequence

    def forward(self, x: Any, positions: Any = None) -> Tensor:
        """Return y (B, S, C); where x is a block of the sequence, so is y.

        positions: those of the whole sequence.  Collective, as MoE is.
        """
        cut = self.sequence
        if cut is not None:
            x = gather_from(cut.comm, x, 1, cut.sizes(x))
        y = super().forward(x, self._index(x, positions))
        if self.balance_loss is not None:
            if self.balance_per_token and is_grad_enabled():
                tokens = int(self.load.sum()) // self.k
                y = _WithLoss.apply(y, self.balance_loss, self.balance_per_token * tokens)
            self.balance_loss = self.balance_loss.detach()  # what is held must not hold the graph
        return y if cut is None else scatter_to(cut.comm, y, 1)

    def _index(self, x: Any, positions: Any) -> Array | None:
        """Return the global index of every token, where it matters which are dropped."""
        if self._limit(1) is None:
            return None
        return row_index(tuple(x.shape[:2]), rng.position().row, positions).astype(np.int64)

    def _limit(self, total: int) -> int | None:
        return super()._limit(total) if self.training else None


class _WithLoss(Function):
    """y; backward gives `loss` the gradient `weight`."""

    @staticmethod
    def forward(ctx: Any, y: Array, loss: Array, weight: float) -> Array:
        """Remember the gradient."""
        ctx.grad = module_of(loss).full(loss.shape, weight, loss.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, Array, None]:
        """Hand both their gradients."""
        return grad, ctx.grad, None
