"""The one place where a loss is scaled: a sum over tokens becomes a mean over all tokens.

The loss of a step is (sum of the ranks' sums) / (sum of the ranks' numbers of valid tokens), never
a mean of means: ranks with few valid tokens would count too much.  Two ranks, 3 and 1 tokens:

    rank 0   2 + 4 + 6 = 12, count 3        mean = (12 + 8) / (3 + 1) = 5
    rank 1   8         =  8, count 1        (the mean of means would be 6)

The gradient convention of training (the loss is replicated over tp and a partial sum over dp and
cp): what is differentiated is that ONE mean, not p copies of it.  So the gradient of each rank's
own loss_sum is 1 / (total count), the gradients of the parameters on the ranks are the terms of a
sum, and `sum_gradients` over the same group makes them those of the whole batch.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.autograd import Function, Tensor
from mpipar.autograd.tensor import is_float
from mpipar.errors import ConfigError, explain
from mpipar.parallel.communicator import Communicator


def token_mean(loss_sum: Any, count: int, comm: Communicator, *, total: int | None = None) -> Any:
    """Return the mean loss over all tokens of the group, replicated; one all_reduce of two numbers.

    loss_sum: this rank's scalar sum over its valid tokens; a Tensor or an array.  count: how many
    those are; 0 is fine on some ranks.  total: the number to divide by, where the batch is done in
    several micro-batches: the count over all of them and all ranks, the same on every rank; the
    means then add up to the mean over the whole batch, and so do the gradients.

    The sums are taken in float64.  Gradient: grad / (total count) to this rank's loss_sum, which is
    this rank's term of the gradient: what adds up the ranks' must not divide again.  That is
    `sum_gradients`, DataParallel(op="sum") and FSDP(op="sum"), not their default op="mean".

    Raises ConfigError on every rank if there is no valid token in the whole group, and before any
    message for a loss_sum that is no single floating-point number or a count that is no number.
    """
    _check(loss_sum, count, total)
    if isinstance(loss_sum, Tensor):
        return _TokenMean.apply(loss_sum, count, comm, total)
    return _mean(loss_sum, count, comm, total)[0]


def token_share(loss_sum: Any, total: int) -> Any:
    """Return this rank's term of the mean over `total` tokens: their sum over the group is it.

    For a batch in many micro-batches, whose loss nobody needs at once: `token_mean` without its
    message, and with the same gradient.  loss_sum, total: as for `token_mean`.

    Raises ConfigError for a loss_sum that is no single floating-point number or a total below 1.
    """
    _check(loss_sum, 0, total)
    if total < 1:
        rule = "there must be at least one valid token in the group"
        raise ConfigError(explain("total", total, rule, "Check the targets and ignore_index"))
    return loss_sum / total


def _check(loss_sum: Any, count: Any, total: Any) -> None:
    """Raise ConfigError for arguments of another kind."""
    given = loss_sum if hasattr(loss_sum, "dtype") else np.asarray(loss_sum)
    if given.size != 1 or not is_float(given.dtype):
        kind = (type(loss_sum).__name__, tuple(given.shape), given.dtype.name)
        rule = "it must be a single floating-point number"
        raise ConfigError(explain("loss_sum", kind, rule, "Sum the losses of this rank's tokens"))
    for name, number in (("count", count), ("total", 0 if total is None else total)):
        if not isinstance(number, int | np.integer) or number < 0:
            rule = "it must be a number of tokens, an integer"
            raise ConfigError(explain(name, number, rule, "Count the targets that are valid"))


def _mean(loss_sum: Array, count: int, comm: Communicator, total: int | None) -> tuple[Array, int]:
    """Return the mean in loss_sum's dtype and shape, and the number divided by."""
    xp = module_of(loss_sum)
    loss_sum = xp.asarray(loss_sum)
    pair = xp.empty(2, np.float64)
    pair[0], pair[1] = loss_sum.reshape(()), count
    pair = comm.all_reduce(pair) if comm.size > 1 else pair
    tokens = int(pair[1]) if total is None else total
    if tokens <= 0:
        rule = "there must be at least one valid token in the group"
        raise ConfigError(explain("count", tokens, rule, "Check the targets and ignore_index"))
    return (pair[0] / tokens).astype(loss_sum.dtype).reshape(loss_sum.shape), tokens


class _TokenMean(Function):
    """(sum over ranks of loss_sum) / (sum over ranks of count)."""

    collective = True

    @staticmethod
    def forward(
        ctx: Any, loss_sum: Array, count: int, comm: Communicator, total: int | None
    ) -> Array:
        """Keep the number of tokens."""
        mean, ctx.tokens = _mean(loss_sum, count, comm, total)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, None, None, None]:
        """No message: the loss is one value, of which this rank's sum is a term."""
        return grad / ctx.tokens, None, None, None
