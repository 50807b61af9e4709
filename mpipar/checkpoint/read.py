"""Reading what a rank holds of a file: whole blocks of 4 MiB, each checked before it is used.

    blocks of the file    |    0    |    1    |    2    |    3    |
    wanted by this rank       ....     . . . . . .                      reads 0, 1 and 2

Neighbouring runs are read at once, since blocks are.  A block is read once: tensors are read in the
order in which they lie in the file.  Memory: one block.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.checkpoint.checksum import BLOCK, of_block
from mpipar.checkpoint.layout import Runs
from mpipar.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """An array to be filled, and where its bytes are in the file, in ascending order."""

    array: Array
    runs: Runs


def read(path: Path, nbytes: int, sums: np.ndarray, targets: Sequence[Target]) -> None:
    """Fill arrays from a file; sums: of its blocks.  Raises CheckpointError for a damaged one."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            blocks = Blocks(file, path, nbytes, sums)
            for target in targets:
                _fill(blocks, target)
        finally:
            os.close(file)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _fill(blocks: "Blocks", target: Target) -> None:
    """Fill one array, block by block."""
    array = target.array
    in_place = isinstance(array, np.ndarray) and array.flags.c_contiguous
    solid = array if in_place else np.empty(array.shape, array.dtype)
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
    if not in_place:
        array[...] = module_of(array).asarray(solid) if is_device(array) else solid


class Blocks:
    """The blocks of an open file; the latest is kept."""

    def __init__(self, file: int, path: Path, nbytes: int, sums: np.ndarray) -> None:
        """Begin with none read."""
        self._file, self._path, self._nbytes, self._sums = file, path, nbytes, sums
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
        size = min(BLOCK, self._nbytes - start)
        done = 0
        while done < size:  # the system may give less at a time
            got = os.preadv(self._file, [self._buffer[done:size].data], start + done)
            if not got:
                raise CheckpointError(f"{self._path} ends at byte {start + done}: it was cut short")
            done += got
        if of_block(self._buffer[:size]) != int(self._sums[number]):
            where = f"in bytes {start} to {start + size}"
            text = f"{self._path} is damaged {where}: their checksum is another than when saved"
            raise CheckpointError(f"{text}. Load an older checkpoint")
        self._here, self._number = self._buffer[:size], number
