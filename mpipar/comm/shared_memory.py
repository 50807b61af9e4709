"""Memory that the ranks of a node share: MPI-3 shared windows (MPI-3.1, section 11.2.3).

    node 0                            node 1
    rank 0   rank 1   rank 2          rank 3   rank 4
    [part 0][part 1][part 2]          [part 0][part 1]       one window a node

A part belongs to its rank, but all ranks of the node can read and write it.
Where it comes from is the library's matter: a file in /dev/shm, whose space is checked before.

Open MPI's wheel names a component that it cannot use whenever a window is made ("OSC UCX component
priority set inside component query failed").  That line is left out here; it does not even arise
with OMPI_MCA_osc=^ucx in the environment, or `mpiexec --mca osc ^ucx`.
"""

import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpipar.comm import node
from mpipar.errors import ConfigError, explain

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup

FOLDER = "/dev/shm"
PAGE = 4096
FIRST_TAG, TAGS = 16, 16000  # of the messages across nodes; they begin again after so many
_NOISE = b"OSC UCX component priority set inside component query failed"


class Team:
    """The nodes of a group: who shares memory, and the group renumbered node by node.

    `local` holds the ranks of this node; `across` all ranks, in the order of nodes, so that the
    ranks of a node are consecutive; `rank` is this one's number there and `sizes` counts the ranks
    of each node.
    """

    def __init__(self, raw: MPI.Intracomm) -> None:
        """Collective over `raw`."""
        self.local, self.nodes = node.share(raw)
        self.sizes = tuple(self.nodes.node_of.count(i) for i in range(self.nodes.count))
        mine = self.nodes.node_of[raw.rank]
        self.rank = sum(self.sizes[:mine]) + self.nodes.local_rank
        self.across = MPI.Intracomm(raw.Split(0, key=self.rank))
        self.across.Set_errhandler(MPI.ERRORS_RETURN)
        self._tags = 0  # given out so far
        teams.add(self)

    def next_tag(self, count: int) -> int:
        """Return the first of `count` tags of `across` that no other window alive uses."""
        if self._tags % TAGS + count > TAGS:
            self._tags += TAGS - self._tags % TAGS
        first = self._tags % TAGS
        self._tags += count
        return FIRST_TAG + first

    def free(self) -> None:
        """Free the communicators; collective."""
        self.local.Free()
        self.across.Free()


teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


class Windows:
    """The windows of one group that are alive, and the team that they share."""

    def __init__(self, group: "ProcessGroup") -> None:
        self._group = group
        self._team: Team | None = None
        self.alive: list[Any] = []  # each with a `destroy`

    @property
    def team(self) -> Team:
        """Who shares memory with whom; collective the first time."""
        if self._team is None:
            self._team = Team(MPI.Intracomm(self._group.raw))
        return self._team

    def close(self) -> None:
        """Destroy what is alive; collective."""
        for window in reversed(self.alive):
            window.destroy()
        if self._team is not None:
            self._team.free()
            self._team = None


class Segment:
    """One window on one node; `parts[i]` is the memory of the node's rank i, as bytes."""

    def __init__(self, local: MPI.Intracomm, nbytes: int) -> None:
        """Collective over `local`; `nbytes` are this rank's own, and may differ."""
        with _without_noise():
            self._window = MPI.Win.Allocate_shared(_whole_pages(nbytes), 1, comm=local)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sync = self._window.Sync
        self.parts = [self._part(rank) for rank in range(local.size)]

    def _part(self, rank: int) -> np.ndarray:
        memory, _unit = self._window.Shared_query(rank)
        return np.asarray(memory)

    def free(self) -> None:
        """Give the memory back; collective.  Arrays that lie in it must not be used any more."""
        self.parts.clear()
        self._window.Unlock_all()
        self._window.Free()


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE


def free_bytes() -> int | None:
    """Return the free space in /dev/shm, or None where there is no such folder."""
    return shutil.disk_usage(FOLDER).free if os.path.isdir(FOLDER) else None


def lack(group: "ProcessGroup", team: Team, nbytes: int, what: str) -> str:
    """Return "" if every node has room for `nbytes` for each rank of it, or else what is lacking.

    Collective over the group, and the same on all its ranks; `nbytes` may differ.
    """
    needed = team.local.allreduce(_whole_pages(nbytes))
    free = free_bytes()
    short = free is not None and free < needed
    told: list[str] = group.raw.allgather(_too_small(what, needed, free or 0) if short else "")
    return next((problem for problem in told if problem), "")


def allocate(group: "ProcessGroup", team: Team, nbytes: int, what: str) -> Segment | None:
    """Return shared memory with `nbytes` for this rank, or None where the library has none.

    Collective over the group.  Raises ConfigError on all its ranks if a node has too little space.
    """
    if problem := lack(group, team, nbytes, what):
        raise ConfigError(problem)
    try:
        segment = Segment(team.local, nbytes)
    except RuntimeError:  # MPI.Exception, or a library that does not know such windows
        segment = None
    if group.raw.allreduce(segment is not None, MPI.LAND):
        return segment
    if segment is not None:
        segment.free()
    return None


def _too_small(what: str, needed: int, free: int) -> str:
    fix = "Make /dev/shm larger (docker run --shm-size), or use fewer or smaller windows"
    rule = (
        f"on {os.uname().nodename} it takes {needed / 2**20:,.1f} MiB of {FOLDER}, "
        f"which has {free / 2**20:,.1f} MiB free"
    )
    return explain("window", what, rule, fix)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Leave Open MPI's line about UCX out of what is written to stderr meanwhile."""
    if MPI.get_vendor()[0] != "Open MPI":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            noisy = any(_NOISE in line for line in lines)
            rest = [x for x in lines if _NOISE not in x and not (noisy and not x.strip())]
            os.write(2, b"".join(rest))
