"""Communicator: the collectives of a group of ranks, for arrays and for Tensors.

A call on an array goes to `mpipar.comm.collectives`; a call on a Tensor goes through the Function
of the same name in `differentiable`, whose forward and backward are calls on arrays.

    comm = mp.Communicator(MPI.COMM_WORLD)
    total = comm.all_reduce(gradient)                 # ring:  r -> r+1, in 2 (p-1) steps
    shards = comm.all_to_all(x, scatter_dim=2, gather_dim=1)
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mpi4py import MPI

from mpipar.arrays import is_device, module
from mpipar.autograd import Function, Tensor
from mpipar.comm import announce, collectives, messages, node
from mpipar.comm.buffers import to_host
from mpipar.comm.check import checking
from mpipar.comm.group import ProcessGroup
from mpipar.comm.small import find
from mpipar.comm.windows import Window
from mpipar.errors import ConfigError, explain
from mpipar.parallel import differentiable
from mpipar.parallel.replicated import slice_of
from mpipar.parallel.staging import StagedHandle, bring, message_of

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

        device: "cpu", or "cuda": the ranks' arrays may live on GPUs, this rank's of those that
        CUDA_VISIBLE_DEVICES leaves by its number on the node.  Results live where x does, those of
        `recv` on the device.
        algorithm: the default of every call: "auto" or a name in `algorithms(collective)`.
        reproducible: add in rank order, so that every run gives the same bits on every rank.
        check: agree on every call before it sends; a mismatch is an error on all ranks together.
        timeout: seconds after which a wait gives up with a report.
        segment_bytes: size of the pieces in which reductions overlap adding with receiving.

        Raises ConfigError for an unknown device or algorithm, or a null or inter-communicator.
        """
        if not isinstance(raw, MPI.Comm) or raw == MPI.COMM_NULL or raw.Is_inter():
            raise ConfigError(
                explain("raw", raw, "it must be an mpi4py intracommunicator", "Pass MPI.COMM_WORLD")
            )
        module(device)
        self.device = device
        self.process_group = ProcessGroup(
            raw, name, algorithm, reproducible, check, timeout, segment_bytes, device
        )
        self.rank, self.size = self.process_group.rank, self.process_group.size
        self.name = self.process_group.name
        self.global_rank, self.global_world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.ranks = node.world_ranks(self.process_group.raw)

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
        return self.process_group.all_seconds

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Communicator cannot be copied or pickled; make another one of its ranks")

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

        Raises ConfigError (op, algorithm), BufferMismatchError, DtypeMismatchError (x, out).
        """
        short = None if async_op else find(self.process_group.small, x, op, out, algorithm)
        if short is not None:
            return short(x, out)
        forms = differentiable.AllReduce, collectives.all_reduce
        return self._run(forms, x, {"op": op}, algorithm, async_op, out)

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
        forms = differentiable.Reduce, collectives.reduce
        return self._run(forms, x, {"dst": dst, "op": op}, algorithm, async_op)

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
        forms = differentiable.ReduceScatter, collectives.reduce_scatter
        where = {"dim": dim, "op": op, "sizes": sizes}
        return self._run(forms, x, where, algorithm, async_op, out)

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
        forms = differentiable.AllGather, collectives.all_gather
        return self._run(forms, x, {"dim": dim, "sizes": sizes}, algorithm, async_op, out)

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
        forms = differentiable.AllToAll, collectives.all_to_all
        where = {"scatter_dim": scatter_dim, "gather_dim": gather_dim, "sizes": sizes}
        return self._run(forms, x, where, algorithm, async_op)

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
        with checking(self.process_group, "all_to_all_4d") as agreed:
            agreed.on("", "")
            if getattr(x, "ndim", None) != 4:
                rule = "it must be [batch, seq, heads, dim]"
                raise ConfigError(explain("x.shape", getattr(x, "shape", x), rule, "Reshape it"))
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
        x, kind = self._announce("broadcast", x, src, template=True)
        forms = differentiable.Broadcast, collectives.broadcast
        return self._run(forms, x, {"kind": kind, "src": src}, algorithm, async_op, out)

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
        x, kind = self._announce("scatter", x, src, template=False)
        forms = differentiable.Scatter, collectives.scatter
        where = {"kind": kind, "src": src, "dim": dim}
        return self._run(forms, x, where, algorithm, async_op)

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
        forms = differentiable.Gather, collectives.gather
        return self._run(forms, x, {"dst": dst, "dim": dim}, algorithm, async_op)

    def shift(self, x: Any, offset: int = 1, *, out: Any = None, async_op: bool = False) -> Any:
        """Return the x of rank r - offset: one step of the ring for offset 1.

        Gradient: shift(-offset).
        """
        forms = differentiable.Shift, collectives.shift
        return self._run(forms, x, {"offset": offset}, None, async_op, out)

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
        return messages.send(self.process_group, message_of(x, "send", self.device), dst, async_op)

    def recv(
        self, shape: Sequence[int], dtype: Any, src: int | None = None, *, async_op: bool = False
    ) -> Any:
        """Return an array of this shape and dtype from rank `src` (default: the previous one).

        Raises BufferMismatchError if another number of bytes arrives.
        """
        return messages.recv(self.process_group, shape, dtype, src, async_op)

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
        x = message_of(x, "sendrecv", self.device)
        return messages.sendrecv(self.process_group, x, dst, shape, dtype, src, async_op)

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        collectives.barrier(self.process_group, None)

    def window(self, n: int, dtype: Any = "float32", slots: int = 2) -> Window:
        """Make vectors of n elements in memory that the ranks of a node share; collective.

        Their all_reduce leaves the result once in a node: see `mpipar.comm.windows`.
        """
        return Window(self.process_group, n, dtype, slots)

    # -- life ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Collective: free it, once; raises MismatchError if others call something else instead."""
        self.process_group.destroy()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error the other ranks may never come to free it
            self.destroy()

    # -- Tensors, and arrays of either kind -------------------------------------------------------

    def _run(
        self,
        forms: tuple[type[Function], Callable],
        x: Any,
        where: dict[str, Any],
        algorithm: str | None,
        async_op: bool,
        out: Any = _NO_OUT,
    ) -> Any:
        """Call the first form for a Tensor, the second for an array.

        A GPU's array in a communicator of the host goes through host memory as a whole.
        """
        of_tensor, of_array = forms
        if isinstance(x, Tensor) or getattr(where.get("kind"), "differentiable", False):
            with checking(self.process_group, of_tensor.__name__) as agreed:
                _arrays_only(None if out is _NO_OUT else out, async_op)
                agreed.on("Tensor", "")
            return of_tensor.apply(x, comm=self, algorithm=algorithm, **where)
        outs = () if out is _NO_OUT else (out,)
        arguments = (*where.values(), *outs, algorithm, async_op)
        if self.device == "cuda" or not (is_device(x) or is_device(out)):
            return of_array(self.process_group, x, *arguments)
        host = to_host(x) if is_device(x) else x
        arguments = (*where.values(), *(None for _ in outs), algorithm, async_op)
        result = of_array(self.process_group, host, *arguments)
        out = None if out is _NO_OUT else out
        return StagedHandle(result, out) if async_op else bring(result, out)

    def _announce(
        self, name: str, x: Any, src: int, template: bool
    ) -> tuple[Any, announce.Announced]:
        """Tell what `src` sends; returns x as this communicator takes it, a Tensor as it is."""
        tensor = isinstance(x, Tensor)
        data = x.data if tensor else x
        if self.device == "cpu" and is_device(data):
            data = to_host(data)
        kind = announce.announce(self.process_group, name, data, src, tensor, template)
        return (x if tensor and kind.differentiable else data), kind


def _arrays_only(out: Any, async_op: bool) -> None:
    """Raise ConfigError if a call on a Tensor has what only arrays have."""
    for name, value in (("out", out), ("async_op", async_op or None)):
        if value is not None:
            rule = "it must not be given for a Tensor, only for arrays"
            raise ConfigError(explain(name, value, rule, "Pass x.data"))
