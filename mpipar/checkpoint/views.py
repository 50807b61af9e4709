"""Short runs of ranks on several nodes: collective writes, through views of the file.

    round    1          2          3              of 4 MiB a rank
    rank 0   t0 t1 t2   t3[0:4M]   t3[4M:5M]      t3: a tensor of which a rank writes more
    rank 1   t0    t2   t3[..]     t3[..]

All ranks walk through the tensors in one order, so that what they write together lies together:
rows of a matrix of which each has some columns make one solid range for MPI-IO.  A round's view of
the file is the rank's runs in it; MPI-IO (ROMIO in MPICH, OMPIO in Open MPI) joins them.
Memory: one round.
"""

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from mpipar.checkpoint.checksum import Sums
from mpipar.checkpoint.layout import Runs
from mpipar.checkpoint.share import Share

ROUND = 1 << 22  # bytes that a rank writes at a time
Part = tuple[np.ndarray, Runs]  # bytes, and where they go


def write(file: MPI.File, share: Share, sums: Sums) -> str:
    """Collective: write this rank's pieces, add what they are to the sums.

    Returns what went wrong on this rank, or "".
    """
    fault = ""
    for data, runs in rounds(share):
        sums.add(data, runs.where, runs.length)
        try:
            _write_round(file, data, runs)
        except MPI.Exception as error:  # go on with the others
            fault = fault or error.Get_error_string()
    return fault


def rounds(share: Share) -> Iterator[Part]:
    """Yield what this rank writes, round by round; the number of rounds is that of every rank."""
    buffer = np.empty(ROUND, np.uint8)
    group: list[int] = []
    filled = 0
    for number, most in enumerate(share.most):
        if filled + most > ROUND and group:
            yield _joined(share, group, 0, ROUND, buffer)
            group, filled = [], 0
        for low in range(0, most, ROUND) if most > ROUND else ():
            yield _joined(share, [number], low, low + ROUND, buffer)
        if most <= ROUND:
            group.append(number)
            filled += most
    if group:
        yield _joined(share, group, 0, ROUND, buffer)


def _joined(share: Share, numbers: list[int], low: int, high: int, buffer: np.ndarray) -> Part:
    """Return bytes low..high of this rank's pieces of some tensors, behind each other."""
    found, at = [], 0
    for number in numbers:
        piece = share.pieces[number]
        if piece is None or piece.nbytes <= low:
            continue
        stop = min(high, piece.nbytes)
        buffer[at : at + stop - low] = piece.bytes(low, stop)
        found.append(piece.runs.part(low, stop))
        at += stop - low
    if not found:
        return buffer[:0], Runs(*(np.zeros(0, np.int64),) * 3)
    where = np.concatenate([runs.where for runs in found])
    length = np.concatenate([runs.length for runs in found])
    return buffer[:at], Runs(np.cumsum(length) - length, where, length)


def _write_round(file: MPI.File, data: np.ndarray, runs: Runs) -> None:
    """Collective: write one round through a view of the file."""
    if len(runs.where) <= 1:
        start = int(runs.where[0]) if len(runs.where) else 0
        file.Set_view(start, MPI.BYTE, MPI.BYTE)
        file.Write_all([data, len(data), MPI.BYTE])
        return
    base = int(runs.where[0])
    view = MPI.BYTE.Create_hindexed(runs.length.tolist(), (runs.where - base).tolist())
    view.Commit()
    try:
        file.Set_view(base, MPI.BYTE, view)
        file.Write_all([data, len(data), MPI.BYTE])
    finally:
        view.Free()
