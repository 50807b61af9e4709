"""Plain data parallelism: the gradients of all ranks are added after backward, in one message.

    rank 0   g0 ─┐
    rank 1   g1 ─┤ all_reduce      every rank: g0 + g1 + g2 + g3
    rank 2   g2 ─┤
    rank 3   g3 ─┘

With the loss from `token_mean` over the same group the sum is the gradient of the whole batch.
Cost: one all_reduce of all gradients a dtype, 2 (p-1)/p n bytes in and out of every rank; nothing
overlaps with backward (the synchroniser with buckets does that).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.wrapped import require_communicator


def sum_gradients(params: Iterable[Any], comm: Communicator) -> None:
    """Replace every parameter's gradient by its sum over the ranks of `comm`.

    Collective: every rank passes parameters of the same shapes in the same order, each once or
    more.  A gradient that is None counts as zeros, so a parameter that only some ranks used comes
    out right and is set everywhere.  The new gradients are views of one buffer a dtype.
    """
    require_communicator(comm)
    if comm.size == 1:
        return
    kinds: dict[np.dtype, dict[int, Any]] = {}
    for param in params:
        kinds.setdefault(param.data.dtype, {})[id(param)] = param
    for dtype, same in kinds.items():
        buffer = _flatten(list(same.values()), dtype)
        comm.all_reduce(buffer, out=buffer)
        start = 0
        for param in same.values():
            param.grad = buffer[start : start + param.data.size].reshape(param.data.shape)
            start += param.data.size


def _flatten(params: list[Any], dtype: np.dtype) -> Array:
    """Return all gradients one after the other in a new buffer."""
    xp = module_of(params[0].data)
    buffer = xp.empty(sum(param.data.size for param in params), dtype)
    start = 0
    for param in params:
        place = buffer[start : start + param.data.size].reshape(param.data.shape)
        if param.grad is None:
            place.fill(0)
        else:
            place[...] = param.grad
        start += param.data.size
    return buffer
