"""The differentiable steps of a mixture of experts: to the experts, through them, and back.

    rows = Dispatch(x)               one exchange     backward: one exchange, k terms a token added
    out = GroupedLinear(rows, w)     local            each expert's rows by its own weight
    y = Combine(out, weights)        one exchange     backward: one exchange
    Balance(probabilities)           one all_reduce   backward: nothing is sent

Sums are taken in float32 for 16-bit values and rounded once.
"""

from typing import Any

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, beside, compute_dtype, module_of
from mpipar.autograd import Function
from mpipar.kernels.embedding import gather, gather_held
from mpipar.kernels.matmul import matmul
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.experts.routing import Plan


class Dispatch(Function):
    """Rows of x (T, C) for this rank's experts (R, C), in their order."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: Array, plan: Plan) -> Array:
        """Send a copy of each token to each of its experts."""
        ctx.plan = plan
        return plan.to_experts(gather(x, plan.tokens))

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, None]:
        """Add the gradients of a token's copies."""
        plan: Plan = ctx.plan
        back, wide = plan.to_tokens(grad), compute_dtype(grad.dtype)
        total = module_of(grad).zeros((len(plan.places), grad.shape[1]), wide)
        for places in plan.places.T:
            total += gather_held(back, places).astype(wide, copy=False)
        return total, None


class Combine(Function):
    """y_t = sum_j w_tj (output for token t of its choice j), (T, C); 0 for a choice dropped."""

    collective = True

    @staticmethod
    def forward(ctx: Any, out: Array, weights: Array, plan: Plan) -> Array:
        """Bring the experts' rows (R, C) back, and add them by weights (T, k)."""
        rows, wide = plan.to_tokens(out), compute_dtype(out.dtype)
        y = module_of(out).zeros((len(weights), out.shape[1]), wide)
        for places, weight in zip(plan.places.T, weights.T, strict=True):
            y += gather_held(rows, places).astype(wide, copy=False) * weight[:, None].astype(wide)
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        return y.astype(out.dtype, copy=False)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, Array, None]:
        """Send w_tj dy_t to the experts; the gradient of w_tj is dy_t . row."""
        plan: Plan = ctx.plan
        rows, weights = ctx.saved
        xp, wide = module_of(grad), compute_dtype(grad.dtype)
        dy = grad.astype(wide, copy=False)
        dweights = xp.empty(weights.shape, wide)
        for choice, places in enumerate(plan.places.T):
            row = gather_held(rows, places).astype(wide, copy=False)
            dweights[:, choice] = xp.einsum("tc,tc->t", dy, row)
        share = xp.take(weights.reshape(-1), plan.sent)[:, None].astype(wide)
        back = (gather(dy, plan.tokens) * share).astype(rows.dtype, copy=False)
        return plan.to_experts(back), dweights, None


class GroupedLinear(Function):
    """Rows (R, in), sizes[e] for expert e, times the expert's weight: w (E, out, in), (R, out)."""

    @staticmethod
    def forward(ctx: Any, rows: Array, w: Array, sizes: tuple[int, ...]) -> Array:
        """Multiply each expert's rows by its own weight."""
        ctx.save_for_backward(rows, w)
        ctx.cuts = _cuts(sizes)
        y = module_of(rows).empty((len(rows), w.shape[1]), rows.dtype)
        for expert, cut in ctx.cuts:
            matmul(rows[cut], w[expert], transpose_b=True, out=y[cut])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, Array, None]:
        """dx = dy w and dw = dy^T x of each expert; zeros for one without rows."""
        rows, w = ctx.saved
        xp = module_of(rows)
        dx, dw = xp.empty(rows.shape, rows.dtype), xp.zeros(w.shape, w.dtype)
        for expert, cut in ctx.cuts:
            matmul(grad[cut], w[expert], out=dx[cut])
            matmul(grad[cut], rows[cut], transpose_a=True, out=dw[expert])
        return dx, dw, None


def _cuts(sizes: tuple[int, ...]) -> list[tuple[int, slice]]:
    """Return (expert, its rows) of the experts that have any."""
    starts = partition.offsets(sizes)
    return [(e, slice(starts[e], starts[e] + n)) for e, n in enumerate(sizes) if n]


class Pick(Function):
    """The elements of x (T, E) at `choice` (T, k), which are different in each row."""

    @staticmethod
    def forward(ctx: Any, x: Array, choice: Array) -> Array:
        """Take them."""
        ctx.choice, ctx.like = choice, x.shape
        return module_of(x).take_along_axis(x, choice, 1)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, None]:
        """Put their gradients back."""
        xp = module_of(grad)
        dx = xp.zeros(ctx.like, grad.dtype)
        xp.put_along_axis(dx, ctx.choice, grad, 1)
        return dx, None


class Balance(Function):
    """E sum_e f_e P_e: P_e the mean probability of expert e over all tokens, f_e its share of them.

    It is 1 when tokens are spread evenly (Fedus et al., 2021, equation 4).  One value, the same on
    every rank; the gradient is that of this one value by this rank's own probabilities, a term of a
    sum over the ranks like those of the loss (`token_mean`).  f_e has no gradient.
    """

    collective = True

    @staticmethod
    def forward(
        ctx: Any, probabilities: Array, shares: np.ndarray, total: int, over: Communicator
    ) -> Array:
        """Add up the probabilities (T, E) of all ranks, in float64."""
        sums = probabilities.sum(0, dtype=np.float64)
        if over.size > 1:
            sums = over.all_reduce(sums)
        ctx.each = beside(len(shares) * shares / max(total, 1), sums)  # (E,)
        ctx.like = probabilities.shape, probabilities.dtype
        return module_of(sums).asarray(ctx.each @ sums, probabilities.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Any, ...]:
        """The same for every token."""
        shape, dtype = ctx.like
        each = (grad * ctx.each).astype(dtype)
        return module_of(each).broadcast_to(each, shape), None, None, None
