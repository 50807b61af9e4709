"""What the chunks of one rank held at the start of each round, for ranks that read its memory.

A rank that is ahead has other values than those that a slower one must still read:

    rank 0, in round 3     chunk 5:  from round 0 on: a,  from round 2 on: b
    rank 1, in round 1     reads a
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Version:
    """A value that a chunk has from the start of a round on; `used` if it made a difference."""

    start: int
    value: Any
    used: bool = False


class History:
    """All values that the chunks of one rank have had."""

    __slots__ = ("_versions",)

    def __init__(self, values: dict[int, Any]) -> None:
        self._versions = {chunk: [Version(0, value)] for chunk, value in values.items()}

    def read(self, chunk: int, number: int) -> Version | None:
        """Return what a chunk holds at the start of a round, which is thereby used."""
        for version in reversed(self._versions.get(chunk, ())):
            if version.start <= number:
                version.used = True
                return version
        return None

    def use(self, chunk: int) -> None:
        """Note that the newest value was sent or added to."""
        self._versions[chunk][-1].used = True

    def write(self, chunk: int, number: int, value: Any) -> None:
        """Enter the value that a chunk has from the start of a round on."""
        self._versions.setdefault(chunk, []).append(Version(number, value))

    def was_used(self, chunk: int) -> bool:
        """Say whether the newest value was used."""
        return self._versions[chunk][-1].used

    @property
    def lost(self) -> list[tuple[int, int]]:
        """The chunks of which a value was never used, and the rounds that replaced it."""
        return [
            (chunk, after.start - 1)
            for chunk, versions in self._versions.items()
            for version, after in pairwise(versions)
            if not version.used
        ]
