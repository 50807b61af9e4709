"""The communicators of FSDP: one copy of the parameters is cut over `shard`, copies face `across`.

    6 ranks, HYBRID_SHARD with shard_size=3      shard  0 1 2   and   3 4 5
                                                 across 0 3     and   1 4     and   2 5

Gathers and reductions have communicators of their own, as ranks may start them at different places
among each other, and among what the rest of the program sends.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import Array
from mpipar.errors import MismatchError
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.mesh import AXES
from mpipar.rng import key

DIRECT_RANKS = 32  # groups up to this size, inside a node, use the algorithms of fewest rounds
ROUND_BYTES = 1 << 18  # received in one of their rounds; there is memory for two rounds
LEAST_SEGMENT = 1 << 15


class Link:
    """A communicator of FSDP's own, and the algorithm that suits a pump; None in a group of one."""

    def __init__(self, comm: Communicator, raw: MPI.Comm, what: str) -> None:
        """Collective over `raw`, which is duplicated; options are those of `comm`."""
        group = comm.process_group
        how: dict[str, Any] = {"algorithm": group.algorithm, "timeout": group.timeout}
        how |= {"reproducible": group.reproducible, "segment_bytes": group.segment_bytes}
        self._of = group
        self.comm = Communicator(raw, comm.device, f"{what} of {comm.name}", **how)
        own = self.comm.process_group
        own.calls = group.calls  # they count as the group's
        few = self.comm.size <= DIRECT_RANKS and own.nodes.count == 1
        self.algorithm = "direct" if few and group.algorithm == "auto" else None
        if self.algorithm is not None and own.segment_bytes is None and self.comm.size > 1:
            own.segment_bytes = max(LEAST_SEGMENT, ROUND_BYTES // (self.comm.size - 1))

    def all_gather(self, own: Array, whole: Array, sizes: tuple[int, ...], what: str) -> Any:
        """Post the gathering of blocks of these sizes in `whole`; return the handle.

        what: which parameters, and what for; ranks that do not agree on that get an error.
        """
        how: dict[str, Any] = {"algorithm": self.algorithm, "async_op": True}
        self.comm.process_group.about = f" of {what}"
        return self.comm.all_gather(own, dim=0, sizes=sizes, out=whole, **how)

    def reduce_scatter(self, whole: Array, own: Array, sizes: tuple[int, ...], op: str) -> Any:
        """Post the reduction of `whole`, of which this rank gets its block; return the handle."""
        how: dict[str, Any] = {"algorithm": self.algorithm, "async_op": True}
        return self.comm.reduce_scatter(whole, dim=0, op=op, sizes=sizes, out=own, **how)

    def all_reduce(self, x: Array, op: str) -> Any:
        """Post the reduction of x in its place; return the handle."""
        return self.comm.all_reduce(x, op, out=x, algorithm=self.algorithm, async_op=True)

    @property
    def bytes(self) -> int:
        """Bytes of what messages that must be added are received in."""
        return self.comm.process_group.pool.bytes

    def give_back(self) -> None:
        """Give back the memory that no message uses."""
        self.comm.process_group.pool.clear()

    def settle(self) -> None:
        """Add the seconds spent here to those of the communicator that FSDP was given."""
        own = self.comm.process_group
        self._of.seconds += own.seconds
        own.seconds = 0.0


class Links:
    """All communicators of one FSDP; see the module.  None stands for a group of one.

    shards: over how many ranks a copy is cut; shard_rank: which block this rank holds; copies: how
    many ranks hold the same block; axis: the name of the mesh axis in the specs.
    """

    def __init__(self, comm: Communicator, shards: int) -> None:
        """Collective over `comm`."""
        self.comm, self.shards = comm, shards
        self.shard_rank, self.copies = comm.rank % shards, comm.size // shards
        self.axis = comm.name if set(comm.name.split("+")) <= set(AXES) else "dp"
        raw = comm.process_group.raw
        hybrid = 1 < shards < comm.size
        near = raw.Split(comm.rank // shards, comm.rank) if hybrid else raw
        far = raw.Split(comm.rank % shards, comm.rank) if hybrid else raw
        self.gather = Link(comm, near, "parameters") if shards > 1 else None
        self.reduce = Link(comm, near, "gradients") if shards > 1 else None
        self.all = Link(comm, raw, "all gradients") if comm.size > 1 else None
        self.across = Link(comm, far, "copies") if hybrid else None
        if hybrid:
            near.Free()
            far.Free()

    def owned(self) -> list[Link]:
        """Return every link, each once."""
        links = (self.gather, self.reduce, self.all, self.across)
        return list({id(link): link for link in links if link is not None}.values())

    @property
    def bytes(self) -> int:
        """Bytes of what messages are received in."""
        return sum(link.bytes for link in self.owned())

    def give_back(self) -> None:
        """Give back the memory that no message uses."""
        for link in self.owned():
            link.give_back()

    def settle(self) -> None:
        """Let the time spent count as that of the communicator that FSDP was given."""
        for link in self.owned():
            link.settle()

    def agree(self, what: str) -> None:
        """Collective: raise MismatchError on every rank unless all describe the same."""
        if self.all is None:
            return
        mine = np.array([key(0, what)], np.uint64).view(np.int64)
        told = self.all.comm.all_gather(mine, dim=0)
        others = np.flatnonzero(told != told[0]).tolist()
        if others:
            self.destroy()
            raise MismatchError(
                f"ranks {others} of communicator {self.comm.name!r} shard other parameters (names, "
                "shapes, dtypes, units), or with other settings, than rank 0. Build the same model "
                "with the same FsdpConfig on every rank"
            )

    def destroy(self) -> None:
        """Collective: free the communicators; a second call does nothing."""
        for link in self.owned():
            link.comm.destroy()
        self.gather = self.reduce = self.all = self.across = None
