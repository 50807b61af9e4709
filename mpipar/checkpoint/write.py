"""Writing a file: all ranks at once through MPI-IO, or each by itself from a thread.

    long runs, such as rows       each rank writes its own, without a word to the others
    short runs on one node        put together in shared memory, written in long ranges (together)
    short runs on several nodes   through views of the file, which MPI-IO joins (views)

The system is told to bring to the disk at once what is written, not when all is there: a sync in
the end then finds little left to do.  Memory: a few MiB a rank, and 16 MiB a node for short runs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import numpy as np
from mpi4py import MPI

from mpipar.checkpoint import together, views
from mpipar.checkpoint.checksum import Sums
from mpipar.checkpoint.share import Share
from mpipar.errors import CheckpointError
from mpipar.parallel.communicator import Communicator

LONG = 1 << 16  # bytes: runs of so many on average are long


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


def write_together(comm: Communicator, path: Path, share: Share) -> tuple[Sums, str]:
    """Collective: write this rank's pieces into a file that is there, and sync it to disk.

    Returns what is to be added to its checksums, and what went wrong on this rank, or "".
    """
    sums = Sums(share.head.nbytes)
    raw = cast(MPI.Intracomm, comm.process_group.raw)
    try:
        file = MPI.File.Open(raw, os.fspath(path), MPI.MODE_WRONLY)
    except MPI.Exception as error:  # on every rank
        return sums, f"{path} cannot be opened: {error.Get_error_string()}"
    with _early(path) as early:

        def put(data: np.ndarray, where: int) -> None:
            file.Write_at(where, [data, len(data), MPI.BYTE])
            early(where, len(data))

        fault = _write(comm, file, share, sums, put)
    try:
        file.Sync()
    except MPI.Exception as error:
        fault = fault or error.Get_error_string()
    file.Close()
    return sums, f"{path} cannot be written: {fault}" if fault else ""


def _write(comm: Communicator, file: MPI.File, share: Share, sums: Sums, put: together.Put) -> str:
    """Collective: write this rank's pieces in the way that suits their runs; return the fault."""
    if _are_long(comm, share):
        try:
            for data, where in _runs(share, sums):
                put(data, where)
        except MPI.Exception as error:
            return str(error.Get_error_string())
        return ""
    memory = together.share_memory(comm)
    if memory is None:
        return views.write(file, share, sums)
    fault = together.write(comm, memory, share, sums, put)
    memory.free()
    return fault


def _are_long(comm: Communicator, share: Share) -> bool:
    """Collective: say whether the runs of all ranks are long, or there is one rank."""
    own = [piece.runs for piece in share.pieces if piece is not None]
    sums = np.array([sum(r.total for r in own), sum(len(r.where) for r in own)], np.int64)
    nbytes, count = comm.all_reduce(sums) if comm.size > 1 else sums
    return bool(comm.size == 1 or nbytes >= LONG * count)


def _runs(share: Share, sums: Sums) -> Iterator[tuple[np.ndarray, int]]:
    """Yield what this rank writes, and where, and add it to the sums."""
    for piece in share.pieces:
        for low in range(0, piece.nbytes if piece else 0, views.ROUND):
            assert piece is not None
            high = min(piece.nbytes, low + views.ROUND)
            data, runs = piece.bytes(low, high), piece.runs.part(low, high)
            sums.add(data, runs.where, runs.length)
            at = 0
            for where, length in zip(runs.where.tolist(), runs.length.tolist(), strict=True):
                yield data[at : at + length], where
                at += length


def write_alone(path: Path, share: Share) -> Sums:
    """Write this rank's pieces at their places, and sync them to disk; no MPI, for any thread.

    Returns what they add to the checksums; raises CheckpointError if that fails.
    """
    sums = Sums(share.head.nbytes)
    try:
        file = os.open(path, os.O_WRONLY)
        try:
            with _early(path) as early:
                for data, where in _runs(share, sums):
                    _write_at(file, data, where)
                    early(where, len(data))
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    return sums


@contextmanager
def _early(path: Path) -> Iterator[Callable[[int, int], None]]:
    """Yield what tells the system to bring a range of a file to the disk now.

    Linux begins to write what it is told will not be needed in memory; elsewhere nothing happens.
    """
    file = -1
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY) if hasattr(os, "posix_fadvise") else -1

    def early(where: int, nbytes: int) -> None:
        if file >= 0 and nbytes >= LONG:
            os.posix_fadvise(file, where, nbytes, os.POSIX_FADV_DONTNEED)

    try:
        yield early
    finally:
        if file >= 0:
            os.close(file)


def _write_at(file: int, data: np.ndarray, where: int) -> None:
    done = 0
    while done < len(data):  # the system may take less at a time
        done += os.pwrite(file, data[done:].data, where + done)
