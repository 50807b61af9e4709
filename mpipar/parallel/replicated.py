"""The pairs of tensor and sequence parallelism, for values replicated over a group.

Inside a tensor-parallel group every rank computes the same loss, so a replicated value is ONE value
that p ranks hold, and the gradient of it is the gradient of that one loss, the same on all ranks.
(The methods of Communicator differentiate the sum of the ranks' losses instead.)

    forward / backward           input          output       source
    copy_to       id / sum       replicated     local use    f of Megatron-LM (Shoeybi 2019, sec. 3)
    reduce_from   sum / id       partial sums   replicated   g of Megatron-LM
    scatter_to    slice / gather replicated     block
    gather_from   gather / slice block          replicated
    all_gather_sequence     all_gather / reduce_scatter      g of Korthikanti 2022, sec. 4.2.2
    reduce_scatter_sequence reduce_scatter / all_gather      its conjugate

A column- and a row-parallel layer on 4 ranks, forward (backward runs the arrows the other way):

    x --copy_to--> x x x x --columns--> y0 y1 y2 y3 --rows--> z0 z1 z2 z3 --reduce_from--> sum(z)

Cost: an all_reduce of n bytes, 2 (p-1)/p n / bandwidth + 2 (p-1) latencies by the ring; a gather or
reduce_scatter half of that.  In a group of one nothing is sent.  Every function takes arrays too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, module_of
from mpipar.autograd import Function, Tensor
from mpipar.errors import ConfigError, DtypeMismatchError, explain

if TYPE_CHECKING:  # Communicator.slice is implemented here
    from mpipar.parallel.communicator import Communicator

Map = Callable[[Array], Array]
Sizes = Sequence[int] | None


def copy_to(comm: Communicator, x: Any) -> Any:
    """Pass a replicated x on to work that differs by rank; its gradient is the sum over ranks."""
    return _pair(comm, x, _same, comm.all_reduce)


def reduce_from(comm: Communicator, x: Any) -> Any:
    """Return the sum of x over the ranks, replicated; its gradient passes unchanged."""
    return _pair(comm, x, comm.all_reduce, _same)


def scatter_to(comm: Communicator, x: Any, dim: int = -1) -> Any:
    """Return this rank's block of a replicated x along `dim`, cut by partition.blocks.

    The gradient of x is the all_gather of the ranks' gradients.
    """
    return slice_of(comm, x, dim, scale_grad=False)


def slice_of(comm: Communicator, x: Any, dim: int = -1, *, scale_grad: bool) -> Any:
    """Return this rank's block of a replicated x along `dim`: the method `Communicator.slice`.

    The gradient of x is the all_gather of the ranks' gradients, divided by the number of ranks if
    `scale_grad` (for a loss whose gradients are summed over the group afterwards).
    """
    sizes = partition.blocks(_length(x, dim), comm.size)
    gather = partial(comm.all_gather, dim=dim, sizes=sizes)
    mean = partial(_divide, by=comm.size)
    cut = partial(_block, dim=dim, sizes=sizes, rank=comm.rank)
    return _pair(comm, x, cut, (lambda grad: gather(mean(grad))) if scale_grad else gather)


def gather_from(comm: Communicator, x: Any, dim: int = -1, sizes: Sizes = None) -> Any:
    """Return the concatenation of the ranks' blocks along `dim`, replicated.

    `sizes`: the sizes of the blocks; None if all are equal.  The gradient is this rank's block.
    """
    sizes = _block_sizes(comm, x, dim, sizes)
    gather = partial(comm.all_gather, dim=dim, sizes=sizes)
    return _pair(comm, x, gather, partial(_block, dim=dim, sizes=sizes, rank=comm.rank))


def all_gather_sequence(comm: Communicator, x: Any, dim: int = 1, sizes: Sizes = None) -> Any:
    """Return the whole sequence from blocks along `dim`, for work that differs by rank.

    `sizes`: the sizes of the blocks; None if all are equal.  The gradient is the reduce_scatter.
    """
    sizes = _block_sizes(comm, x, dim, sizes)
    gather = partial(comm.all_gather, dim=dim, sizes=sizes)
    return _pair(comm, x, gather, partial(comm.reduce_scatter, dim=dim, sizes=sizes))


def reduce_scatter_sequence(comm: Communicator, x: Any, dim: int = 1, sizes: Sizes = None) -> Any:
    """Return this rank's block along `dim` of the sum of x over the ranks.

    `sizes`: the sizes of the blocks; None cuts by partition.blocks.  The gradient is the
    all_gather.
    """
    length = _length(x, dim)
    sizes = partition.blocks(length, comm.size) if sizes is None else tuple(sizes)
    scatter = partial(comm.reduce_scatter, dim=dim, sizes=sizes)
    return _pair(comm, x, scatter, partial(comm.all_gather, dim=dim, sizes=sizes))


class _Pair(Function):
    """A map with its adjoint; recorded on every rank of the group, so that backward never hangs."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: Array, run: Map, adjoint: Map) -> Array:
        """Keep the adjoint, which needs no values, only shapes."""
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, None, None]:
        """Run the adjoint."""
        return ctx.adjoint(grad), None, None


def _pair(comm: Communicator, x: Any, run: Map, adjoint: Map) -> Any:
    """Run a map on a Tensor through the tape, on an array directly; a group of one has no work."""
    if comm.size == 1:
        return x
    if isinstance(x, Tensor):
        return _Pair.apply(x, run, adjoint)
    return run(x)


def _same(x: Array) -> Array:
    return x


def _divide(x: Array, by: int) -> Array:
    return x / by


def _block(x: Array, dim: int, sizes: tuple[int, ...], rank: int) -> Array:
    """Return a contiguous copy of block `rank` of x along `dim`."""
    start = sum(sizes[:rank])
    cut = [slice(None)] * x.ndim
    cut[dim] = slice(start, start + sizes[rank])
    return module_of(x).ascontiguousarray(x[tuple(cut)])


def _length(x: Any, dim: int) -> int:
    """Return the size of x along dim.

    Raises ConfigError for a dim that x does not have, and DtypeMismatchError for what is no array
    of numbers.
    """
    if not hasattr(x, "dtype") or x.dtype.kind in "OSU":
        kind = x.dtype.name if hasattr(x, "dtype") else type(x).__name__
        rule = "x must be an array, or a Tensor, of numbers"
        raise DtypeMismatchError(explain("x", kind, rule, "Convert it"))
    if not isinstance(dim, int | np.integer) or not -x.ndim <= dim < x.ndim:
        rule = f"it must be a dimension of x, of shape {tuple(x.shape)}"
        raise ConfigError(explain("dim", dim, rule, "Choose one of them"))
    return int(x.shape[dim])


def _block_sizes(comm: Communicator, x: Any, dim: int, sizes: Sizes) -> tuple[int, ...]:
    """Return the sizes of all ranks' blocks: equal ones unless stated.

    Raises ConfigError if the stated ones do not fit this rank's block.
    """
    length = _length(x, dim)
    if sizes is None:
        return (length,) * comm.size
    if len(sizes) != comm.size or sizes[comm.rank] != length:
        rule = f"there must be one size a rank, for this one {length}"
        raise ConfigError(explain("sizes", tuple(sizes), rule, "Pass the blocks of all ranks"))
    return tuple(sizes)
