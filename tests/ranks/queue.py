"""Queues of tests that run on one rank: whichever rank is free takes the next."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class Queue(Generic[T]):
    """A list that every rank of this host holds, and of which each entry goes to one of them.

    The entry that a rank takes is the length of a shared file before the rank lengthened it:

        file    x x x x             rank 0 writes an x after 4 others: it takes entry 4
                0 1 2 3 | 4 5 ...   rank 2 writes one at the same time: entry 5
    """

    def __init__(self, path: Path, entries: Sequence[T]) -> None:
        self.entries = entries
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __iter__(self) -> Iterator[T]:
        """Take entries until none is left."""
        while (number := self._take()) < len(self.entries):
            yield self.entries[number]

    def _take(self) -> int:
        os.write(self.file, b"x")  # one step for the system: two ranks never get the same place
        return os.lseek(self.file, 0, os.SEEK_CUR) - 1
