r"""How much the clocks of other nodes are ahead of rank 0's, which asks them for the time.

    rank 0    t0 ------\            /-----> t1        ahead = t - (t0 + t1) / 2,
                        \          /                  wrong by half the time of the round trip
    leader               -> tells t                   at most: the quickest of some counts

The ranks of a node share its clock, so only the first rank of each is asked.
"""

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

TAG, TIMES = 8, 10

Clock = Callable[[], float]


def offsets(comm: MPI.Comm, leaders: Sequence[int], clock: Clock) -> list[tuple[float, float]]:
    """Return for each node by how many seconds its clock is ahead, and how far that may be wrong.

    Collective over the leaders, the first rank of each node in `comm`; right on rank 0 only.
    """
    found = [(0.0, 0.0)]
    for leader in leaders[1:]:
        if comm.rank == 0:
            found.append(_ask(comm, leader, clock))
        elif comm.rank == leader:
            _answer(comm, clock)
    return found


def _ask(comm: MPI.Comm, peer: int, clock: Clock) -> tuple[float, float]:
    """Return how much the clock of `peer`, which calls `_answer`, is ahead, and how surely."""
    best = (0.0, float("inf"))
    there = np.empty(1)
    for _ in range(TIMES):
        before = clock()
        comm.Send([there, 0, MPI.DOUBLE], peer, TAG)
        comm.Recv([there, 1, MPI.DOUBLE], peer, TAG)
        after = clock()
        if (after - before) / 2 < best[1]:
            best = (float(there[0]) - (before + after) / 2, (after - before) / 2)
    return best


def _answer(comm: MPI.Comm, clock: Clock) -> None:
    """Tell rank 0 the time as often as it asks."""
    data = np.empty(1)
    for _ in range(TIMES):
        comm.Recv([data, 0, MPI.DOUBLE], 0, TAG)
        data[0] = clock()
        comm.Send([data, 1, MPI.DOUBLE], 0, TAG)
