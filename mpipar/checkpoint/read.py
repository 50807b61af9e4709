"""Reading what a rank holds of a file: whole blocks of 4 MiB, whose checksums are compared.

    blocks of the file    |    0    |    1    |    2    |    3    |
    wanted by this rank       ....     . . . . . .                      reads 0, 1 and 2

    few blocks are wanted by several ranks    each rank reads its own, and checks each at once
    many are, by ranks of one node            they read them once, in turns, and check them in the
                                              end, by sums that are added up (together)

Neighbouring runs are read at once, since blocks are.  A block is read once: tensors are read in the
order in which they lie in the file.  Memory: one block, or 16 MiB a node.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.checkpoint import agree, together
from mpipar.checkpoint.checksum import BLOCK, of_block
from mpipar.checkpoint.layout import Runs
from mpipar.errors import CheckpointError
from mpipar.parallel.communicator import Communicator

SEVERAL = 1.5  # ranks on average that want a block: more of them read together


@dataclass(frozen=True)
class Target:
    """An array to be filled, and where its bytes are in the file, in ascending order."""

    array: Array
    runs: Runs


def read(
    comm: Communicator, path: Path, nbytes: int, sums: np.ndarray, targets: Sequence[Target]
) -> None:
    """Collective: fill arrays from a file of so many bytes; sums: of its blocks.

    Raises CheckpointError on every rank if one finds it damaged or cannot read it.
    """
    scattered = not all(_in_place(target.array) for target in targets)
    count = np.array([*_blocks(nbytes, targets), scattered], np.int64)
    count = comm.all_reduce(count) if comm.size > 1 else count
    wanting, memory = count[:-1], None  # how many ranks want each block
    if wanting.sum() > SEVERAL * (wanting > 0).sum() and not count[-1]:
        memory = together.share_memory(comm)
    if memory is None:
        agree.together(comm, lambda: _read_alone(path, nbytes, sums, targets))
        return
    own = [(target.array.reshape(-1).view(np.uint8), target.runs) for target in targets]
    with _opened(path, together.RANGE) as get:
        read, fault = together.read(comm, memory, wanting > 0, nbytes, own, get)
    memory.free()
    total = comm.all_reduce(read.values.view(np.int64)).view(np.uint64)
    agree.together(comm, lambda: _check(path, nbytes, fault, total, sums, wanting))


def _blocks(nbytes: int, targets: Sequence[Target]) -> np.ndarray:
    """Return for each block of the file whether any byte of it is wanted."""
    change = np.zeros(-(-nbytes // BLOCK) + 1, np.int64)
    for where, length in ((t.runs.where, t.runs.length) for t in targets):
        some = length > 0
        np.add.at(change, where[some] // BLOCK, 1)
        np.add.at(change, (where + length - 1)[some] // BLOCK + 1, -1)
    found: np.ndarray = np.cumsum(change)[:-1] > 0
    return found


def _check(
    path: Path, nbytes: int, fault: str, total: np.ndarray, sums: np.ndarray, wanting: np.ndarray
) -> None:
    """Raise CheckpointError if this rank could not read, or blocks are not what was saved."""
    if fault:
        raise CheckpointError(f"{path} cannot be read: {fault}")
    for number in np.flatnonzero((total != sums) & (wanting > 0)).tolist():
        raise _damaged(path, nbytes, number)


def _damaged(path: Path, nbytes: int, number: int) -> CheckpointError:
    start = number * BLOCK
    where = f"in bytes {start} to {min(start + BLOCK, nbytes)}"
    text = f"{path} is damaged {where}: their checksum is another than when saved"
    return CheckpointError(f"{text}. Load an older checkpoint")


@contextmanager
def _opened(path: Path, ahead: int = 0) -> Iterator[Callable[[np.ndarray, int], None]]:
    """Yield what reads bytes from a place of a file; it raises OSError, also if there is none.

    ahead: the system is told to bring as many bytes as are read from so much further on, meanwhile.
    """
    file = -1

    def get(data: np.ndarray, where: int) -> None:
        nonlocal file
        file = os.open(path, os.O_RDONLY) if file < 0 else file
        if ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, where + ahead, len(data), os.POSIX_FADV_WILLNEED)
        _read_at(file, data, where)

    try:
        yield get
    finally:
        if file >= 0:
            os.close(file)


def _read_at(file: int, data: np.ndarray, where: int) -> None:
    done = 0
    while done < len(data):  # the system may give less at a time
        got = os.preadv(file, [data[done:].data], where + done)
        if not got:
            raise OSError(errno.EIO, f"it ends at byte {where + done}, so it was cut short")
        done += got


def _read_alone(path: Path, nbytes: int, sums: np.ndarray, targets: Sequence[Target]) -> None:
    """Fill arrays block by block; raises CheckpointError for a damaged file."""
    try:
        with _opened(path) as get:
            blocks = Blocks(get, path, nbytes, sums)
            for target in targets:
                _fill(blocks, target)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _in_place(array: Array) -> bool:
    """Say whether bytes of a file can be put where they lie in the array."""
    return isinstance(array, np.ndarray) and array.flags.c_contiguous


def _fill(blocks: "Blocks", target: Target) -> None:
    """Fill one array, block by block."""
    array = target.array
    solid = array if _in_place(array) else np.empty(array.shape, array.dtype)
    out = solid.reshape(-1).view(np.uint8)
    runs = target.runs
    base = int(runs.local[0]) if len(runs.local) else 0
    for local, where, length in zip(
        (runs.local - base).tolist(), runs.where.tolist(), runs.length.tolist(), strict=True
    ):
        done = 0
        while done < length:
            part = blocks.at(where + done)[: length - done]
            out[local + done : local + done + len(part)] = part
            done += len(part)
    if solid is not array:
        array[...] = module_of(array).asarray(solid) if is_device(array) else solid


class Blocks:
    """The blocks of a file; the latest is kept."""

    def __init__(self, get: together.Get, path: Path, nbytes: int, sums: np.ndarray) -> None:
        """Begin with none read."""
        self._get, self._path, self._nbytes, self._sums = get, path, nbytes, sums
        self._buffer = np.empty(min(BLOCK, nbytes), np.uint8)
        self._here = self._buffer[:0]
        self._number = -1

    def at(self, where: int) -> np.ndarray:
        """Return the bytes of the file from `where` to the end of its block."""
        number, offset = divmod(where, BLOCK)
        if number != self._number:
            self._load(number)
        return self._here[offset:]

    def _load(self, number: int) -> None:
        """Read a block and check it."""
        start = number * BLOCK
        here = self._buffer[: min(BLOCK, self._nbytes - start)]
        self._get(here, start)
        if of_block(here) != int(self._sums[number]):
            raise _damaged(self._path, self._nbytes, number)
        self._here, self._number = here, number
