"""Who shares a node with whom, and how many cores and BLAS threads a rank gets.

The ranks of a node are found by comparing a hash of the host's name and boot id, which one small
all-gather carries.  MPIPAR_FAKE_NODES="0,0,1,1" (a node number for each world rank) lets tests
and simulations pretend another layout.
"""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpipar.errors import ConfigError, explain


@dataclass(frozen=True)
class Nodes:
    """The node layout of a group.

    `node_of[r]` numbers the nodes by their first rank; `sizes` counts ranks by node if every node's
    ranks are consecutive, else it is None; `local_rank` and `local_size` are this rank's.
    """

    node_of: tuple[int, ...]
    sizes: tuple[int, ...] | None
    local_rank: int
    local_size: int

    @property
    def count(self) -> int:
        """The number of nodes."""
        return max(self.node_of) + 1


def arrange(keys: list[int], rank: int) -> Nodes:
    """Build the layout from one host key for each rank."""
    numbers: dict[int, int] = {}
    node_of = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
    consecutive = list(node_of) == sorted(node_of)
    sizes = tuple(node_of.count(n) for n in range(len(numbers))) if consecutive else None
    mine = node_of[rank]
    return Nodes(node_of, sizes, node_of[:rank].count(mine), node_of.count(mine))


def discover(comm: MPI.Comm, told: int) -> tuple[Nodes, list[int], bool]:
    """Find the node layout of `comm`, what each rank tells, and whether any node is crowded.

    Collective.  A node is crowded if the launcher put more ranks there than it has cores.
    """
    pretended = _pretended()
    key = _host_key() if pretended is None else pretended
    mine = np.array([key, told, (_launched() or 0) > cores()], np.int64)
    everyone = np.empty((comm.size, mine.size), np.int64)
    comm.Allgather([mine, mine.size, MPI.INT64_T], [everyone, mine.size, MPI.INT64_T])
    keys, notes, crowded = everyone.T
    return arrange(keys.tolist(), comm.rank), notes.tolist(), bool(crowded.any())


def share(comm: MPI.Intracomm) -> tuple[MPI.Intracomm, Nodes]:
    """Return the ranks of `comm` that can share memory with this one, and that layout; collective.

    The library knows better than the host's name who can: containers on one host may not.
    """
    local = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    pretended = _pretended()
    if pretended is not None:
        smaller = MPI.Intracomm(local.Split(pretended, key=comm.rank))
        local.Free()
        local = smaller
    firsts: list[int] = comm.allgather(local.allreduce(comm.rank, MPI.MIN))
    return local, arrange(firsts, comm.rank)


def world_ranks(raw: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks in MPI.COMM_WORLD of the members of `raw`."""
    group, world = raw.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(raw.size)), world)
    group.Free()
    world.Free()
    return tuple(ranks)


def _pretended() -> int | None:
    fake = os.environ.get("MPIPAR_FAKE_NODES")
    if not fake:
        return None
    numbers, ranks = fake.split(","), MPI.COMM_WORLD.size
    if len(numbers) < ranks or not all(number.strip().isdigit() for number in numbers):
        rule = f"it must be a node number for each of the {ranks} ranks"
        raise ConfigError(explain("MPIPAR_FAKE_NODES", fake, rule, "For example 0,0,1,1"))
    return int(numbers[MPI.COMM_WORLD.rank])


def _host_key() -> int:
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = platform.node() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_ranks(nodes: Nodes) -> int:
    """Return how many ranks of the job share this node: the launcher's word, else the group's."""
    return _launched() or nodes.local_size


def local_rank(nodes: Nodes) -> int:
    """Return this process's number on its node: the launcher's word, else that in the group."""
    for variable in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return nodes.local_rank


def _launched() -> int | None:
    """Return the ranks that the launcher put on this node, or None if it does not say."""
    for variable in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return None


_threads: int | None = None


def set_blas_threads(nodes: Nodes) -> int:
    """Give each rank its share of the node's cores for BLAS, once for the process.

    A rank bound to its own cores uses those.  MPIPAR_BLAS_THREADS overrides; returns the number.
    """
    global _threads
    if _threads is None:
        import threadpoolctl

        wanted = os.environ.get("MPIPAR_BLAS_THREADS", "")
        available = os.cpu_count() or 1
        share = cores() if cores() < available else cores() // local_ranks(nodes)
        _threads = int(wanted) if wanted.isdigit() else max(1, share)
        threadpoolctl.threadpool_limits(_threads, user_api="blas")
    return _threads
