"""Writing a file: all ranks at once through MPI-IO, or each by itself from a thread.

    round    1          2          3              of 4 MiB a rank
    rank 0   t0 t1 t2   t3[0:4M]   t3[4M:5M]      t3: a tensor of which a rank writes more
    rank 1   t0    t2   t3[..]     t3[..]

All ranks walk through the tensors in one order, so that what they write together lies together:
rows of a matrix of which each has some columns make one solid range for MPI-IO.  A round's view of
the file is the rank's runs in it; MPI-IO (ROMIO in MPICH, OMPIO in Open MPI) joins them.
Memory: one round.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from mpi4py import MPI

from mpipar.checkpoint.checksum import Sums
from mpipar.checkpoint.layout import Runs
from mpipar.checkpoint.share import Share
from mpipar.errors import CheckpointError
from mpipar.parallel.communicator import Communicator

ROUND = 1 << 22  # bytes that a rank writes at a time
LONG = 1 << 12  # bytes of a run, from which on it is no use to join it with those of other ranks
Part = tuple[np.ndarray, Runs]  # bytes, and where they go


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


def create(path: Path, share: Share) -> None:
    """Make the file, at its full size and with its head; for one rank."""
    with open(path, "xb") as file:
        file.truncate(share.head.nbytes)
        file.write(share.head.text)
        file.flush()
        os.fsync(file.fileno())


def head_sums(share: Share) -> Sums:
    """Return the sums of a file in which there is nothing but its head."""
    sums = Sums(share.head.nbytes)
    head = np.frombuffer(share.head.text, np.uint8)
    sums.add(head, np.zeros(1, np.int64), np.array([len(head)], np.int64))
    return sums


def _hints(comm: Communicator, share: Share) -> MPI.Info:
    """Collective: let ROMIO write long runs as they are, not joined on one rank of each node.

    Joined, 1 GiB of columns of 4 KiB costs twice the processor time.
    """
    own = [piece.runs for piece in share.pieces if piece is not None]
    sums = np.array([sum(r.total for r in own), sum(len(r.where) for r in own)], np.int64)
    nbytes, count = comm.all_reduce(sums) if comm.size > 1 else sums
    info = MPI.Info.Create()
    if nbytes >= LONG * count:
        info.Set("romio_cb_write", "disable")
        info.Set("romio_ds_write", "disable")
    return info


def write_together(comm: Communicator, path: Path, share: Share) -> tuple[Sums, str]:
    """Collective: write this rank's pieces into a file that is there, and sync it to disk.

    Returns what they add to its checksums, and what went wrong, on this rank: "" if nothing did.
    """
    sums, fault = Sums(share.head.nbytes), ""
    raw = cast(MPI.Intracomm, comm.process_group.raw)
    hints = _hints(comm, share)
    try:
        file = MPI.File.Open(raw, os.fspath(path), MPI.MODE_WRONLY, hints)
    except MPI.Exception as error:  # on every rank
        return sums, f"{path} cannot be opened: {error.Get_error_string()}"
    finally:
        hints.Free()
    for data, runs in rounds(share):
        sums.add(data, runs.where, runs.length)
        try:
            _write_round(file, data, runs)
        except MPI.Exception as error:  # go on with the others
            fault = fault or f"{path} cannot be written: {error.Get_error_string()}"
    try:
        file.Sync()
    except MPI.Exception as error:
        fault = fault or f"{path} cannot be written: {error.Get_error_string()}"
    file.Close()
    return sums, fault


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


def write_alone(path: Path, share: Share) -> Sums:
    """Write this rank's pieces at their places, and sync them to disk; no MPI, for any thread.

    Returns what they add to the checksums; raises CheckpointError if that fails.
    """
    sums = Sums(share.head.nbytes)
    try:
        file = os.open(path, os.O_WRONLY)
        try:
            for data, runs in rounds(share):
                sums.add(data, runs.where, runs.length)
                places = zip(
                    runs.local.tolist(), runs.where.tolist(), runs.length.tolist(), strict=True
                )
                for local, where, length in places:
                    _write_at(file, data[local : local + length], where)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    return sums


def _write_at(file: int, data: np.ndarray, where: int) -> None:
    done = 0
    while done < len(data):  # the system may take less at a time
        done += os.pwrite(file, data[done:].data, where + done)
