"""Short runs of ranks on one node: put together in memory that they share, in long ranges.

    range of the file     | a0 b0 c0 d0 a1 b1 c1 d1 |      rows of a matrix, cut by columns
    into shared memory    rank 0: a0 a1  rank 1: b0 b1     each to where it belongs
    into the file         rank 0: a0 b0  rank 1: c0 d0     a solid part of the range each

Written as they are, runs of 4 KiB cost each rank a call to the system for each, and the ranks wait
for each other's; this way costs one copy more.  Reading goes the other way: each rank brings its
part of a range, and takes from the whole what it holds, so that what several ranks hold is read
and summed once.  Two ranges take turns, so that the ranks meet once for each.  Memory: 2 x 8 MiB
for a node.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from mpipar.checkpoint.checksum import BLOCK, Sums
from mpipar.checkpoint.layout import Runs
from mpipar.checkpoint.share import Share
from mpipar.comm.shared_memory import PAGE, Segment, allocate, lack
from mpipar.comm.window_memory import refusal
from mpipar.parallel.communicator import Communicator
from mpipar.partition import block

RANGE = 1 << 23
Put = Callable[[np.ndarray, int], None]  # writes bytes at a place of the file
Get = Callable[[np.ndarray, int], None]  # reads bytes from a place of the file


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
            if piece is not None and (cut := piece.runs.between(low, high)) != (0, 0):
                data = piece.bytes(*cut)
                for there, own in _pairs(here, data, piece.runs.part(*cut), low):
                    there[...] = own
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


def read(
    comm: Communicator, memory: Segment, wanted: np.ndarray, nbytes: int,
    own: Sequence[tuple[np.ndarray, Runs]], get: Get,
) -> tuple[Sums, str]:  # fmt: skip
    """Collective: read what any rank wants of a file into what each holds.

    wanted: of each block whether any rank wants it.  own: bytes, run after run, and where they are.
    Returns the sums of what this rank has read, and what went wrong on it, or "".
    """
    fault, sums, slots = "", Sums(nbytes), memory.parts[0][: 2 * RANGE].reshape(2, RANGE)
    own = [(data, runs) for data, runs in own if len(runs.where)]
    starts = np.array([runs.where[0] for _, runs in own])
    stops = np.array([runs.where[-1] + runs.length[-1] for _, runs in own])
    turn = 0
    for low in range(0, nbytes, RANGE):
        high = min(low + RANGE, nbytes)
        if not wanted[low // BLOCK : -(-high // BLOCK)].any():
            continue
        here = slots[turn % 2][: high - low]
        turn += 1
        mine = _part(comm, high - low)
        try:
            get(here[mine], low + mine.start)
        except OSError as error:  # go on with the others
            fault = fault or str(error.strerror or error)
        sums.add(here[mine], np.array([low + mine.start]), np.array([mine.stop - mine.start]))
        memory.sync()
        comm.barrier()  # all have read this range, and taken what they hold of the one before
        memory.sync()
        for one in np.flatnonzero((starts < high) & (stops > low)).tolist():
            data, runs = own[one]
            if (cut := runs.between(low, high)) != (0, 0):
                for there, held in _pairs(here, data[slice(*cut)], runs.part(*cut), low):
                    held[...] = there
    return sums, fault


def _part(comm: Communicator, nbytes: int) -> slice:
    """Return this rank's part of a range, whole pages."""
    pages = block(-(-nbytes // PAGE), comm.size, comm.rank)
    return slice(min(nbytes, pages.start * PAGE), min(nbytes, pages.stop * PAGE))


def _pairs(
    here: np.ndarray, data: np.ndarray, runs: Runs, low: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield bytes of the range that begins at `low`, and the same ones of a rank's own.

    data: the rank's, run after run.  The rows of a matrix are one pair.
    """
    where, length = runs.where - low, runs.length
    local = np.cumsum(length) - length
    count, steps = len(where), np.diff(where)
    even = slice(1, count - 1)  # the first and the last run may be cut by the range
    if count > 3 and (length[even] == length[1]).all() and (steps[even] == steps[1]).all():
        shape = count - 2, int(length[1])
        rows = np.lib.stride_tricks.as_strided(here[where[1] :], shape, (int(steps[1]), 1))
        yield rows, data[local[1] : local[-1]].reshape(shape)
        chosen = [0, count - 1]
    else:
        chosen = list(range(count))
    for number in chosen:
        at, begin, size = int(where[number]), int(local[number]), int(length[number])
        yield here[at : at + size], data[begin : begin + size]
