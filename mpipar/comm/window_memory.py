"""How a window is laid out in the memory that the ranks of a node share.

    first rank's part    [counters][vector A][vector B]      twice as many vectors as the others:
    second rank's part   [vector C]                          the sum lies in one of them while the
    third rank's part    [vector D]                          next contribution is written (see
                                                             window_reduction.py)

Every vector begins on a cache line.  All are written once at the start: every page is there from
then on, near its rank, and no reduction waits for the system to find one.
"""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.flags import Flags
from mpipar.comm.shared_memory import Segment, Team, allocate

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup

LINE = 64  # bytes
log = logging.getLogger("mpipar")
_said: set[str] = set()


@dataclass
class Memory:
    """The vectors of one window, as bytes: `vectors[i]` are those of the node's rank i, in turn."""

    segment: Segment
    team: Team
    vectors: list[list[np.ndarray]]
    flags: Flags
    tag: int

    def typed(self, start: int, n: int, dtype: np.dtype) -> list[list[np.ndarray]]:
        """Return `n` elements of every vector from byte `start` on."""
        part = slice(start, start + n * dtype.itemsize)
        return [[vector[part].view(dtype) for vector in of_rank] for of_rank in self.vectors]


def whole_lines(nbytes: int) -> int:
    """Return the bytes of the cache lines that `nbytes` fill."""
    return -(-nbytes // LINE) * LINE


def lay_out(
    group: "ProcessGroup", team: Team, nbytes: int, slots: int, what: str, tags: int
) -> Memory | None:
    """Return vectors of `nbytes` in shared memory, all zeros; None if there is no such memory.

    what: the user's words for it.  tags: how many tags its messages across nodes take.
    Collective over the group.  Raises ConfigError on all ranks if the memory is too small.
    """
    local, rank = team.nodes.local_size, team.nodes.local_rank
    length, counters = whole_lines(nbytes), Flags.nbytes(local)
    mine = slots * length if rank else counters + 2 * slots * length
    segment = allocate(group, team, mine, what)
    if segment is None:
        return None
    memory = segment.parts

    def vectors(part: int, start: int, count: int) -> list[np.ndarray]:
        return [memory[part][start + i * length :][:nbytes] for i in range(count)]

    made = Memory(
        segment,
        team,
        [vectors(0, counters, 2 * slots), *(vectors(i, 0, slots) for i in range(1, local))],
        Flags(memory[0], local, rank, segment.sync),
        team.next_tag(tags),
    )
    if rank == 0:
        memory[0][:counters] = 0
    for vector in made.vectors[rank]:
        vector[:] = 0
    segment.sync()
    team.local.Barrier()
    segment.sync()
    return made


def refusal(group: "ProcessGroup") -> str:
    """Return why this group shall not share memory, or ""; equal on all ranks.  Collective."""
    if group.raw.allreduce(os.environ.get("MPIPAR_WINDOWS", "1") == "0"):
        return "MPIPAR_WINDOWS=0"
    if group.reproducible and group.windows.team.nodes.count > 1:
        return "reproducible=True adds in rank order, not node by node"
    return ""


def say_once(group: "ProcessGroup", what: str, reason: str) -> None:
    """Say, on rank 0 and once, why there is private memory in place of shared memory."""
    text = f"{what} use messages and private memory: {reason}"
    if group.rank == 0 and text not in _said:
        _said.add(text)
        log.warning("mpipar: %s", text)


def in_turn(vectors: list[Any], number: int) -> Any:
    """Return what is used in turn `number`."""
    return vectors[number % len(vectors)]


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view
