"""Short runs of ranks on one node: put together in memory that they share, written in long ranges.

    range of the file     | a0 b0 c0 d0 a1 b1 c1 d1 |      rows of a matrix, cut by columns
    into shared memory    rank 0: a0 a1  rank 1: b0 b1     each to where it belongs
    into the file         rank 0: a0 b0  rank 1: c0 d0     a solid part of the range each

Written as they are, runs of 4 KiB cost each rank a call to the system for each, and the ranks wait
for each other's; this way costs one copy more.  Two ranges take turns, so that the ranks meet once
for each.  Memory: 2 x 8 MiB for a node.
"""

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpipar.checkpoint.checksum import Sums
from mpipar.checkpoint.share import Piece, Share
from mpipar.comm.shared_memory import PAGE, Segment, allocate, lack
from mpipar.comm.window_memory import refusal
from mpipar.parallel.communicator import Communicator
from mpipar.partition import block

RANGE = 1 << 23
Put = Callable[[np.ndarray, int], None]  # writes bytes at a place of the file


def share_memory(comm: Communicator) -> Segment | None:
    """Collective: return memory for two ranges if all ranks are on one node that has it."""
    group, what = comm.process_group, "ranges of a checkpoint"
    nbytes = 2 * RANGE if comm.rank == 0 else 0
    if refusal(group) or group.windows.team.nodes.count > 1:
        return None
    if lack(group, group.windows.team, nbytes, what):
        return None
    return allocate(group, group.windows.team, nbytes, what)


def write(comm: Communicator, memory: Segment, share: Share, sums: Sums, put: Put) -> str:
    """Collective: write the file's ranges, add this rank's parts of them to the sums.

    Returns what went wrong on this rank, or "".
    """
    fault, slots = "", memory.parts[0][: 2 * RANGE].reshape(2, RANGE)
    starts = [place.start for place in share.head.places]
    low, turn = len(share.head.text), 0
    while low < share.head.nbytes:
        high = min(low + RANGE, share.head.nbytes)
        here = slots[turn % 2][: high - low]
        first = max(0, int(np.searchsorted(starts, low, "right")) - 1)
        for piece in share.pieces[first : int(np.searchsorted(starts, high))]:
            if piece is not None:
                _fill(here, piece, low, high)
        memory.sync()
        comm.barrier()  # all have filled this range, and written the one before the last
        memory.sync()
        mine = _part(comm, high - low)
        if len(data := here[mine]):
            where = low + mine.start
            sums.add(data, np.array([where]), np.array([len(data)]))
            try:
                put(data, where)
            except MPI.Exception as error:  # go on with the others
                fault = fault or error.Get_error_string()
        low, turn = high, turn + 1
    return fault


def _part(comm: Communicator, nbytes: int) -> slice:
    """Return this rank's part of a range, whole pages."""
    pages = block(-(-nbytes // PAGE), comm.size, comm.rank)
    return slice(min(nbytes, pages.start * PAGE), min(nbytes, pages.stop * PAGE))


def _fill(here: np.ndarray, piece: Piece, low: int, high: int) -> None:
    """Copy what a piece has of bytes low..high of the file to where it belongs."""
    start, stop = piece.runs.between(low, high)
    if start == stop:
        return
    data, runs = piece.bytes(start, stop), piece.runs.part(start, stop)
    where, length = runs.where - low, runs.length
    local = np.cumsum(length) - length
    count, steps = len(where), np.diff(where)
    even = slice(1, count - 1)  # the first and the last run may be cut by the range
    if count > 3 and (length[even] == length[1]).all() and (steps[even] == steps[1]).all():
        shape = count - 2, int(length[1])
        rows = np.lib.stride_tricks.as_strided(here[where[1] :], shape, (int(steps[1]), 1))
        rows[...] = data[local[1] : local[-1]].reshape(shape)
        chosen = [0, count - 1]
    else:
        chosen = list(range(count))
    for number in chosen:
        at, begin, size = int(where[number]), int(local[number]), int(length[number])
        here[at : at + size] = data[begin : begin + size]
