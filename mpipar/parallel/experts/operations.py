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
from mpipar.arrays import compute_dtype
from mpipar.autograd import Function
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.experts.routing import Plan


class Dispatch(Function):
    """Rows of x (T, C) for this rank's experts (R, C), in their order."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: np.ndarray, plan: Plan) -> np.ndarray:
        """Send a copy of each token to each of its experts."""
        ctx.plan = plan
        return plan.to_experts(x[plan.tokens])

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> tuple[np.ndarray, None]:
        """Add the gradients of a token's copies."""
        plan: Plan = ctx.plan
        back = plan.to_tokens(grad)
        total = np.zeros((len(plan.places), grad.shape[1]), compute_dtype(grad.dtype))
        for places in plan.places.T:
            at = np.flatnonzero(places >= 0)
            total[at] += back[places[at]]
        return total, None


class Combine(Function):
    """y_t = sum_j w_tj (output for token t of its choice j), (T, C); 0 for a choice dropped."""

    collective = True

    @staticmethod
    def forward(ctx: Any, out: np.ndarray, weights: np.ndarray, plan: Plan) -> np.ndarray:
        """Bring the experts' rows (R, C) back, and add them by weights (T, k)."""
        rows = plan.to_tokens(out)
        y = np.zeros((len(weights), out.shape[1]), compute_dtype(out.dtype))
        for places, weight in zip(plan.places.T, weights.T, strict=True):
            at = np.flatnonzero(places >= 0)
            y[at] += rows[places[at]] * weight[at, None].astype(y.dtype)
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        return y.astype(out.dtype, copy=False)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """Send w_tj dy_t to the experts; the gradient of w_tj is dy_t . row."""
        plan: Plan = ctx.plan
        rows, weights = ctx.saved
        wide = compute_dtype(grad.dtype)
        back = np.empty(rows.shape, rows.dtype)
        dweights = np.zeros(weights.shape, wide)
        for choice, places in enumerate(plan.places.T):
            at = np.flatnonzero(places >= 0)
            dy = grad[at].astype(wide, copy=False)
            dweights[at, choice] = np.einsum("tc,tc->t", dy, rows[places[at]].astype(wide))
            back[places[at]] = dy * weights[at, choice, None].astype(wide)
        return plan.to_experts(back), dweights, None


class GroupedLinear(Function):
    """Rows (R, in), sizes[e] for expert e, times the expert's weight: w (E, out, in), (R, out)."""

    @staticmethod
    def forward(ctx: Any, rows: np.ndarray, w: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
        """Multiply each expert's rows by its own weight."""
        ctx.save_for_backward(rows, w)
        ctx.cuts = _cuts(sizes)
        wide = compute_dtype(rows.dtype)
        y = np.empty((len(rows), w.shape[1]), rows.dtype)
        for expert, cut in ctx.cuts:
            y[cut] = rows[cut].astype(wide, copy=False) @ w[expert].T.astype(wide, copy=False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """dx = dy w and dw = dy^T x of each expert; zeros for one without rows."""
        rows, w = ctx.saved
        wide = compute_dtype(rows.dtype)
        dx, dw = np.empty(rows.shape, rows.dtype), np.zeros(w.shape, w.dtype)
        for expert, cut in ctx.cuts:
            dy = grad[cut].astype(wide, copy=False)
            dx[cut] = dy @ w[expert].astype(wide, copy=False)
            dw[expert] = dy.T @ rows[cut].astype(wide, copy=False)
        return dx, dw, None


def _cuts(sizes: tuple[int, ...]) -> list[tuple[int, slice]]:
    """Return (expert, its rows) of the experts that have any."""
    starts = partition.offsets(sizes)
    return [(e, slice(starts[e], starts[e] + n)) for e, n in enumerate(sizes) if n]


class Pick(Function):
    """The elements of x (T, E) at `choice` (T, k), which are different in each row."""

    @staticmethod
    def forward(ctx: Any, x: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """Take them."""
        ctx.choice, ctx.like = choice, x.shape
        return np.take_along_axis(x, choice, 1)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> tuple[np.ndarray, None]:
        """Put their gradients back."""
        dx = np.zeros(ctx.like, grad.dtype)
        np.put_along_axis(dx, ctx.choice, grad, 1)
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
        ctx: Any, probabilities: np.ndarray, shares: np.ndarray, total: int, over: Communicator
    ) -> np.ndarray:
        """Add up the probabilities (T, E) of all ranks, in float64."""
        sums = probabilities.sum(0, dtype=np.float64)
        if over.size > 1:
            sums = over.all_reduce(sums)
        ctx.each = len(shares) * shares / max(total, 1)  # (E,)
        ctx.like = probabilities.shape, probabilities.dtype
        return np.asarray(ctx.each @ sums, probabilities.dtype)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> tuple[Any, ...]:
        """The same for every token."""
        shape, dtype = ctx.like
        return np.broadcast_to((grad * ctx.each).astype(dtype), shape), None, None, None
