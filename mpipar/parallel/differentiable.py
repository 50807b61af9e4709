"""The collectives of Communicator on Tensors: each stands beside its adjoint.

What is differentiated is the SUM over ranks of each rank's scalar loss, so every backward is the
true adjoint: <A x, y> = <x, A' y>, both summed over ranks.

    all_reduce(sum)  <->  all_reduce(sum)          all_gather  <->  reduce_scatter
    broadcast        <->  reduce(sum)              gather      <->  scatter
    all_to_all       <->  the reverse trade        shift(k)    <->  shift(-k)

All are recorded on every rank whatever requires_grad says, and backward runs them in reverse
order, with zeros where no gradient arrived: a rank without a loss still answers the others.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.arrays import module_of
from mpipar.autograd import Function
from mpipar.comm import announce, collectives
from mpipar.comm.announce import Announced
from mpipar.errors import ConfigError, explain
from mpipar.partition import blocks

if TYPE_CHECKING:
    from mpipar.parallel.communicator import Communicator


class _Collective(Function):
    collective = True


class AllReduce(_Collective):
    """Sum and mean are their own adjoints; max, min and prod by their derivative."""

    @staticmethod
    def forward(ctx: Any, x: np.ndarray, *, comm: "Communicator", op: str, algorithm: Any) -> Any:
        """Keep what the derivative needs: nothing for a sum."""
        if not isinstance(op, str):
            raise ConfigError(
                explain("op", op, "an MPI.Op has no derivative", "Pass an array, or a name")
            )
        ctx.comm, ctx.op, ctx.algorithm = comm, op, algorithm
        y = comm.all_reduce(x, op=op, algorithm=algorithm)
        if op not in ("sum", "mean"):
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Reduce the gradient; scatter it to the extreme's holders; or times the other factors."""
        if ctx.op in ("sum", "mean"):
            return ctx.comm.all_reduce(grad, op=ctx.op, algorithm=ctx.algorithm)
        x, y = ctx.saved
        total = ctx.comm.all_reduce(grad)
        if ctx.op in ("max", "min"):
            holds = (x == y).astype(x.dtype)
            return total * holds / ctx.comm.all_reduce(holds)
        factors = ctx.comm.all_gather(x[None], dim=0)  # (p, ...)
        others = np.delete(factors, ctx.comm.rank, axis=0)
        return total * np.prod(others, axis=0, dtype=x.dtype)


class AllGather(_Collective):
    """all_gather / reduce_scatter with the same sizes."""

    @staticmethod
    def forward(
        ctx: Any, x: np.ndarray, *, comm: "Communicator", dim: int, sizes: Any, algorithm: Any
    ) -> Any:
        """Settle the sizes first, since backward needs them."""
        ctx.comm, ctx.dim = comm, dim
        axis = dim % x.ndim if x.ndim else dim
        ctx.sizes = announce.gathered_sizes(comm.process_group, x.shape[axis], sizes)
        return comm.all_gather(x, dim=dim, sizes=ctx.sizes, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Sum what all ranks make of this rank's block."""
        return ctx.comm.reduce_scatter(grad, dim=ctx.dim, sizes=ctx.sizes)


class ReduceScatter(_Collective):
    """reduce_scatter (sum or mean) / all_gather."""

    @staticmethod
    def forward(
        ctx: Any,
        x: np.ndarray,
        *,
        comm: "Communicator",
        dim: int,
        op: str,
        sizes: Sequence[int] | None,
        algorithm: Any,
    ) -> Any:
        """Keep the sizes."""
        if op not in ("sum", "mean"):
            raise ConfigError(
                explain(
                    "op", op, "a Tensor's reduce_scatter must be a sum or mean", "Use all_reduce"
                )
            )
        ctx.comm, ctx.dim, ctx.op = comm, dim, op
        ctx.sizes = blocks(x.shape[dim], comm.size) if sizes is None else tuple(sizes)
        return comm.reduce_scatter(x, dim=dim, op=op, sizes=ctx.sizes, algorithm=algorithm)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Every rank's x contributed to every block."""
        full = ctx.comm.all_gather(grad, dim=ctx.dim, sizes=ctx.sizes)
        return full / ctx.comm.size if ctx.op == "mean" else full


class AllToAll(_Collective):
    """all_to_all / the reverse trade."""

    @staticmethod
    def forward(
        ctx: Any,
        x: np.ndarray,
        *,
        comm: "Communicator",
        scatter_dim: int,
        gather_dim: int,
        sizes: Any,
        algorithm: Any,
    ) -> Any:
        """Keep both cuts."""
        group = comm.process_group
        ctx.comm, ctx.algorithm = comm, algorithm
        ctx.dims = scatter_dim % x.ndim, gather_dim % x.ndim
        ctx.gathered = announce.gathered_sizes(group, x.shape[ctx.dims[1]], sizes)
        ctx.scattered = blocks(x.shape[ctx.dims[0]], comm.size)
        return collectives.all_to_all(
            group, x, ctx.dims[0], ctx.dims[1], ctx.gathered, algorithm, False
        )

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Cut along what was joined, join along what was cut."""
        scatter_dim, gather_dim = ctx.dims
        return collectives.all_to_all(
            ctx.comm.process_group,
            grad,
            gather_dim,
            scatter_dim,
            ctx.scattered,
            ctx.algorithm,
            False,
            scatter_sizes=ctx.gathered,
        )


class Broadcast(_Collective):
    """broadcast / reduce to the source."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, *, comm: "Communicator", kind: Announced, src: int, algorithm: Any
    ) -> Any:
        """Keep the source."""
        ctx.comm, ctx.src = comm, src
        group = comm.process_group
        return collectives.broadcast(group, x, kind, src, None, algorithm, False)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """The source's x gets the sum; an x elsewhere took no part."""
        return ctx.comm.reduce(grad, dst=ctx.src)


class Reduce(_Collective):
    """reduce (sum or mean) to one rank / broadcast from it."""

    @staticmethod
    def forward(
        ctx: Any, x: np.ndarray, *, comm: "Communicator", dst: int, op: str, algorithm: Any
    ) -> Any:
        """Off the root the result is a Tensor of size 0."""
        if op not in ("sum", "mean"):
            raise ConfigError(
                explain("op", op, "a Tensor's reduce must be a sum or mean", "Use all_reduce")
            )
        ctx.comm, ctx.dst, ctx.op = comm, dst, op
        y = comm.reduce(x, dst=dst, op=op, algorithm=algorithm)
        return module_of(x).empty(0, x.dtype) if y is None else y

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Every rank's x contributed alike."""
        comm = ctx.comm
        full = comm.broadcast(grad if comm.rank == ctx.dst else None, src=ctx.dst)
        return full / comm.size if ctx.op == "mean" else full


class Gather(_Collective):
    """gather to one rank / scatter from it."""

    @staticmethod
    def forward(
        ctx: Any, x: np.ndarray, *, comm: "Communicator", dst: int, dim: int, algorithm: Any
    ) -> Any:
        """Off the root the result is a Tensor of size 0."""
        ctx.comm, ctx.dst, ctx.dim = comm, dst, dim
        ctx.sizes = announce.gathered_sizes(comm.process_group, x.shape[dim], "exchange")
        y = comm.gather(x, dst=dst, dim=dim, algorithm=algorithm)
        return module_of(x).empty(0, x.dtype) if y is None else y

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Each rank gets the gradient of the block that it brought."""
        group, root = ctx.comm.process_group, ctx.dst
        x = grad if ctx.comm.rank == root else None
        kind = announce.announce(group, "scatter", x, root, False, template=False)
        return collectives.scatter(
            group, x, kind, root, ctx.dim, group.algorithm, False, sizes=ctx.sizes
        )


class Scatter(_Collective):
    """scatter from one rank / gather to it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        *,
        comm: "Communicator",
        kind: Announced,
        src: int,
        dim: int,
        algorithm: Any,
    ) -> Any:
        """Keep the source."""
        ctx.comm, ctx.src, ctx.dim = comm, src, dim
        group = comm.process_group
        return collectives.scatter(group, x, kind, src, dim, algorithm, False)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """The source's x gets the blocks together; an x elsewhere took no part."""
        return ctx.comm.gather(grad, dst=ctx.src, dim=ctx.dim)


class Shift(_Collective):
    """shift(k) / shift(-k)."""

    @staticmethod
    def forward(
        ctx: Any, x: np.ndarray, *, comm: "Communicator", offset: int, algorithm: Any
    ) -> Any:
        """Keep the distance."""
        ctx.comm, ctx.offset = comm, offset
        return comm.shift(x, offset)

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> Any:
        """Send the gradient back."""
        return ctx.comm.shift(grad, -ctx.offset)
