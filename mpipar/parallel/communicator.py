"""Communicator: the collectives of a group of ranks, for arrays and for Tensors.

A call on an array goes to `mpipar.comm.collectives`; a call on a Tensor goes through the Function
of the same name in `differentiable`, whose forward and backward are calls on arrays.

    comm = mp.Communicator(MPI.COMM_WORLD)
    total = comm.all_reduce(gradient)                 # ring:  r -> r+1, in 2 (p-1) steps
    shards = comm.all_to_all(x, scatter_dim=2, gather_dim=1)
"""

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from mpi4py import MPI

from mpipar.arrays import is_device, module
from mpipar.autograd import Tensor
from mpipar.comm import collectives, messages
from mpipar.comm.buffers import to_device, to_host
from mpipar.comm.group import Handle, ProcessGroup
from mpipar.comm.small import find
from mpipar.errors import ConfigError, explain
from mpipar.parallel import differentiable
from mpipar.parallel.replicated import slice_of

Sizes = Sequence[int] | str | None
_NO_OUT = object()


class Communicator:
    """Collectives over the ranks of a group.

    rank, size: this rank within the group, and the number of its ranks (`world_size` is the same).
    ranks: the members' ranks in MPI.COMM_WORLD; global_rank, global_world_size: there.
    calls: how often each collective ran; seconds: time spent inside them.
    """

    def __init__(
        self,
        raw: MPI.Comm,
        device: str = "cpu",
        name: str = "",
        algorithm: str = "auto",
        reproducible: bool = False,
        check: bool = False,
        timeout: float = 600.0,
        segment_bytes: int | None = None,
    ) -> None:
        """Collective over `raw`, which is duplicated; any mpi4py intracommunicator will do.

        device: "cpu" or "cuda", where results of `recv` live.
        algorithm: the default of every call: "auto" or a name in `algorithms(collective)`.
        reproducible: add in rank order, so that every run gives the same bits on every rank.
        check: agree on every call before it sends; a mismatch is an error on all ranks together.
        timeout: seconds after which a wait gives up with a report.
        segment_bytes: size of the pieces in which reductions overlap adding with receiving.

        Raises ConfigError for an unknown device or algorithm, or a null or inter-communicator.
        """
        if not isinstance(raw, MPI.Comm) or raw == MPI.COMM_NULL or raw.Is_inter():
            raise ConfigError(
                explain("raw", raw, "it is an mpi4py intracommunicator", "Pass MPI.COMM_WORLD")
            )
        module(device)
        self.device = device
        self.process_group = ProcessGroup(
            raw, name, algorithm, reproducible, check, timeout, segment_bytes
        )
        self.rank, self.size = self.process_group.rank, self.process_group.size
        self.name = self.process_group.name
        self.global_rank, self.global_world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.ranks = _world_ranks(self.process_group.raw)

    @property
    def world_size(self) -> int:
        """The number of ranks of this group."""
        return self.size

    @property
    def calls(self) -> Counter[str]:
        """How often each collective was called."""
        return self.process_group.calls

    @property
    def seconds(self) -> float:
        """Seconds that this rank has spent inside collectives."""
        return self.process_group.seconds

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size}, {self.device})"

    # -- reductions ------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the reduction of all ranks' x, on every rank.

        x: array or Tensor of equal shape and dtype on all ranks.
        op: "sum", "mean", "max", "min", "prod", or an MPI.Op (arrays only).
        Gradient: sum and mean by themselves; max and min go to the ranks that hold the extreme,
        shared on ties; prod exact.

        Raises ConfigError (op, algorithm), BufferMismatchError and DtypeMismatchError (x, out).
        """
        short = None if async_op else find(self.process_group.small, x, op, out, algorithm)
        if short is not None:
            return short(x, out)
        if isinstance(x, Tensor):
            self._tensor_only(out=out, async_op=async_op)
            if not isinstance(op, str):
                raise ConfigError(
                    explain("op", op, "an MPI.Op has no derivative", "Pass an array, or a name")
                )
            return differentiable.AllReduce.apply(x, comm=self, op=op, algorithm=algorithm)
        return self._call(collectives.all_reduce, x, op, out=out, last=(algorithm, async_op))

    def reduce(
        self,
        x: Any,
        dst: int = 0,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the reduction of all ranks' x on rank `dst`; elsewhere None (a Tensor of size 0).

        Gradient (sum, mean): broadcast from `dst`.
        """
        if isinstance(x, Tensor):
            self._tensor_only(async_op=async_op)
            return differentiable.Reduce.apply(x, comm=self, dst=dst, op=op, algorithm=algorithm)
        return self._call(collectives.reduce, x, dst, op, last=(algorithm, async_op))

    def reduce_scatter(
        self,
        x: Any,
        dim: int = -1,
        op: Any = "sum",
        sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's block along `dim` of the reduction of all ranks' x.

        sizes: the blocks' sizes; None cuts by partition.blocks.  Gradient: all_gather.
        """
        if isinstance(x, Tensor):
            self._tensor_only(out=out, async_op=async_op)
            return differentiable.ReduceScatter.apply(
                x, comm=self, dim=dim, op=op, sizes=sizes, algorithm=algorithm
            )
        return self._call(
            collectives.reduce_scatter, x, dim, op, sizes, out=out, last=(algorithm, async_op)
        )

    # -- moving data -----------------------------------------------------------------------------

    def all_gather(
        self,
        x: Any,
        dim: int = -1,
        sizes: Sizes = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return all ranks' x joined along `dim`, on every rank.

        sizes: None if all ranks bring the same shape; "exchange" to ask; or every rank's size.
        Gradient: reduce_scatter with the same sizes.
        """
        if isinstance(x, Tensor):
            self._tensor_only(out=out, async_op=async_op)
            return differentiable.AllGather.apply(
                x, comm=self, dim=dim, sizes=sizes, algorithm=algorithm
            )
        return self._call(
            collectives.all_gather, x, dim, sizes, out=out, last=(algorithm, async_op)
        )

    def all_to_all(
        self,
        x: Any,
        scatter_dim: int,
        gather_dim: int,
        sizes: Sizes = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Trade a cut along `gather_dim` for one along `scatter_dim`.

        Rank r sends block j of `scatter_dim` (partition.blocks) to rank j and joins what it gets
        along `gather_dim`; sizes are those of the gathered dimension, as for all_gather.
        Gradient: the reverse trade.
        """
        if isinstance(x, Tensor):
            self._tensor_only(async_op=async_op)
            return differentiable.AllToAll.apply(
                x,
                comm=self,
                scatter_dim=scatter_dim,
                gather_dim=gather_dim,
                sizes=sizes,
                algorithm=algorithm,
            )
        return self._call(
            collectives.all_to_all, x, scatter_dim, gather_dim, sizes, last=(algorithm, async_op)
        )

    def all_to_all_4d(
        self,
        x: Any,
        scatter_dim: int = 2,
        gather_dim: int = 1,
        sizes: Sizes = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """all_to_all of [batch, seq, heads, dim]: (2, 1) trades sequence shards for head shards.

        The way there and back of Ulysses attention (Jacobs et al. 2023, section 3).
        Raises ConfigError if x does not have four dimensions.
        """
        if x.ndim != 4:
            raise ConfigError(
                explain("x.ndim", x.ndim, "x is [batch, seq, heads, dim]", "Reshape it")
            )
        return self.all_to_all(
            x, scatter_dim, gather_dim, sizes, algorithm=algorithm, async_op=async_op
        )

    def broadcast(
        self,
        x: Any = None,
        src: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the x of rank `src`, on every rank; elsewhere x may be None.

        The result is a Tensor if the source's x is one.  Gradient: reduce to `src`.
        """
        data, tensor = _data(x)
        host = to_host(data) if is_device(data) else data
        kind = collectives.announce(self.process_group, "broadcast", host, src, tensor, True)
        if kind.differentiable:
            self._tensor_only(out=out, async_op=async_op)
            return differentiable.Broadcast.apply(
                x, comm=self, kind=kind, src=src, algorithm=algorithm
            )
        return self._call(
            collectives.broadcast, host, kind, src, out=out, last=(algorithm, async_op)
        )

    def scatter(
        self,
        x: Any = None,
        src: int = 0,
        dim: int = -1,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's block (partition.blocks) along `dim` of the x of rank `src`.

        Elsewhere x may be None.  The result is a Tensor if the source's x is one.
        Gradient: gather to `src`.
        """
        data, tensor = _data(x)
        host = to_host(data) if is_device(data) else data
        kind = collectives.announce(self.process_group, "scatter", host, src, tensor, False)
        if kind.differentiable:
            self._tensor_only(async_op=async_op)
            return differentiable.Scatter.apply(
                x, comm=self, kind=kind, src=src, dim=dim, algorithm=algorithm
            )
        return self._call(collectives.scatter, host, kind, src, dim, last=(algorithm, async_op))

    def gather(
        self,
        x: Any,
        dst: int = 0,
        dim: int = -1,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return all ranks' x joined along `dim` on rank `dst`; elsewhere None (Tensor of size 0).

        Sizes along `dim` may differ.  Gradient: scatter from `dst`.
        """
        if isinstance(x, Tensor):
            self._tensor_only(async_op=async_op)
            return differentiable.Gather.apply(x, comm=self, dst=dst, dim=dim, algorithm=algorithm)
        return self._call(collectives.gather, x, dst, dim, last=(algorithm, async_op))

    def shift(self, x: Any, offset: int = 1, *, out: Any = None, async_op: bool = False) -> Any:
        """Return the x of rank r - offset: one step of the ring for offset 1.

        Gradient: shift(-offset).
        """
        if isinstance(x, Tensor):
            self._tensor_only(out=out, async_op=async_op)
            return differentiable.Shift.apply(x, comm=self, offset=offset)
        return self._call(collectives.shift, x, offset, out=out, last=(None, async_op))

    def slice(self, x: Any, dim: int = -1, *, scale_grad: bool) -> Any:
        """Return this rank's block along `dim` of an x that all ranks hold alike.

        Gradient: the all_gather of the ranks' gradients, divided by size if `scale_grad`.
        """
        return slice_of(self, x, dim, scale_grad=scale_grad)

    # -- two ranks -------------------------------------------------------------------------------

    def send(self, x: Any, dst: int | None = None, *, async_op: bool = False) -> Any:
        """Send x to rank `dst` (default: the next of the ring); arrays only.

        Returns when the peer receives; with async_op at once, with a handle.
        """
        return messages.send(self.process_group, self._array(x, "send"), dst, async_op)

    def recv(
        self, shape: Sequence[int], dtype: Any, src: int | None = None, *, async_op: bool = False
    ) -> Any:
        """Return an array of this shape and dtype from rank `src` (default: the previous one).

        Raises BufferMismatchError if another number of bytes arrives.
        """
        result = messages.recv(self.process_group, shape, dtype, src, async_op)
        return self._home(result, async_op)

    def sendrecv(
        self,
        x: Any,
        dst: int | None = None,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        src: int | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Send x to `dst` while receiving from `src`; shape and dtype default to those of x."""
        x = self._array(x, "sendrecv")
        result = messages.sendrecv(self.process_group, x, dst, shape, dtype, src, async_op)
        return self._home(result, async_op)

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        collectives.barrier(self.process_group, None)

    # -- life ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the duplicated communicator; collective; calling it twice is harmless."""
        self.process_group.destroy()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:  # after an error the other ranks may never come to free it
            self.destroy()

    # -- arrays of either kind -------------------------------------------------------------------

    def _call(
        self, function: Callable, x: Any, *middle: Any, out: Any = _NO_OUT, last: tuple
    ) -> Any:
        """Call a collective of `mpipar.comm`; device arrays are staged through host memory."""
        if not is_device(x) and not is_device(out) and self.device == "cpu":
            outs = () if out is _NO_OUT else (out,)
            return function(self.process_group, x, *middle, *outs, *last)
        host = to_host(x) if is_device(x) else x
        outs = () if out is _NO_OUT else (None,)
        result = function(self.process_group, host, *middle, *outs, *last)
        return self._home(result, last[-1], None if out is _NO_OUT else out)

    def _home(self, result: Any, async_op: bool, out: Any = None) -> Any:
        """Bring a host result to the communicator's device."""
        if self.device == "cpu" and out is None:
            return result
        return StagedHandle(result, out) if async_op else _bring(result, out)

    def _array(self, x: Any, name: str) -> Any:
        if isinstance(x, Tensor):
            if x.requires_grad:
                raise ConfigError(
                    explain(
                        "x",
                        "a Tensor that requires grad",
                        f"{name} is not differentiable",
                        "Pass x.data, or use shift or all_to_all",
                    )
                )
            x = x.data
        return to_host(x) if is_device(x) else x

    @staticmethod
    def _tensor_only(out: Any = None, async_op: bool = False) -> None:
        for name, value in (("out", out), ("async_op", async_op)):
            if value is not None and value is not False:
                raise ConfigError(
                    explain(name, value, "it goes with arrays, not with a Tensor", "Pass x.data")
                )


class StagedHandle:
    """A handle whose result is brought to the device when it is waited for."""

    def __init__(self, inner: Handle, out: Any) -> None:
        self._inner, self._out = inner, out

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        return self._inner.test()

    def wait(self) -> Any:
        """Wait for the result and return it."""
        return _bring(self._inner.wait(), self._out)


def _bring(result: Any, out: Any) -> Any:
    if result is None:
        return None
    if out is None:
        return to_device(result)
    out[...] = to_device(result) if is_device(out) else result
    return out


def _data(x: Any) -> tuple[Any, bool]:
    return (x.data, True) if isinstance(x, Tensor) else (x, False)


def _world_ranks(raw: MPI.Comm) -> tuple[int, ...]:
    group, world = raw.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(raw.size)), world)
    group.Free()
    world.Free()
    return tuple(ranks)
