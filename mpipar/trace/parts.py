"""The part of a trace that one rank writes: lines of JSON, as the run goes.

    {"rank": 2, "host": "node1", "origin": 81.25, "clock": [[9127.5, 0.003]], ...}   first line
    ["channel", 5, "dp", 2, 2]                        communicator 5: name, lowest rank, size
    ["label", 0, "all_reduce/ring", 4096, "..."]      what calls are, each written once
    ["call", 9127.500101, 9127.500932, 5, 0, 17]      from, to; channel, label, sequence
    ["clock", 9131.0, 0.0031]                         last line

A run that dies leaves what it had written: a line that was not written to its end ends a part.

Clocks differ between nodes and drift.  `clock` says how much this rank's was ahead of rank 0's, at
the start and, if the run came to its end, there; in between lies a straight line.  On the common
clock 0 is the start of the trace.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpipar.errors import ConfigError, explain
from mpipar.trace.record import Row

PATTERN = "rank-*.jsonl"
FORMAT = 1

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Event(NamedTuple):
    """Something that took time on a rank, in seconds of the common clock.

    kind: step, phase, action (of a pipeline), call, wait (inside a call) or flight.
    communicator: its name, for the last four.  group: which of that name, the same text on all its
    ranks; with `sequence`, the number of a collective, that says which calls belong together.
    """

    rank: int
    kind: str
    name: str
    start: float
    stop: float
    communicator: str = ""
    group: str = ""
    sequence: int = 0
    bytes: int = 0
    details: str = ""


def path_of(directory: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return directory / f"rank-{rank:05}.jsonl"


class Writer:
    """Writes a part; failure: why it could not go on, or ""."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Make the file; raises OSError if that is impossible."""
        self.failure = ""
        self._file = path.open("w", encoding="utf-8")
        try:
            self._file.write(json.dumps({"format": FORMAT, **header}) + "\n")
            self._file.flush()
        except OSError:
            self.close()
            raise

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows; once that has failed, nothing more is written."""
        if self.failure:
            return
        try:
            self._file.writelines(_encode(row) + "\n" for row in rows)
            self._file.flush()
        except OSError as error:
            self.failure = error.strerror or str(error)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or error.strerror or str(error)


class Part:
    """The file of one rank, read."""

    def __init__(self, path: Path) -> None:
        """Read what is said of the rank; raises ConfigError for a file of something else."""
        self.path = path
        try:
            with path.open(encoding="utf-8") as file:
                self.header: dict[str, Any] = json.loads(file.readline())
            good = self.header["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            good = False
        except OSError as error:
            rule = f"it cannot be read ({error.strerror})"
            raise ConfigError(
                explain("trace", str(path), rule, "Name the folder of --trace")
            ) from None
        if not good:
            rule = "it is no part of a trace that this version has written"
            raise ConfigError(explain("trace", str(path), rule, "Name the folder of --trace"))
        self.rank: int = self.header["rank"]
        self.complete = False  # whether the run came to its end
        self.lost = 0
        self._pipelines: dict[int, tuple[str, str]] = {}
        self._clock: list[tuple[float, float]] = [tuple(self.header["clock"])]
        self._labels: dict[int, list[Any]] = {}
        self._channels: dict[int, tuple[str, int, int]] = {}
        self._read_definitions()

    def pipelines(self) -> dict[str, tuple[str, str]]:
        """Return name and CSV of the schedules that ran here, by group."""
        groups = self._groups()
        return {groups[number]: told for number, told in self._pipelines.items()}

    def events(self) -> Iterator[Event]:
        """Yield what was recorded, in the order in which it ended."""
        groups = self._groups()
        rank, common = self.rank, self._common
        for row in self._rows():
            kind = row[0]
            if kind in ("call", "flight"):
                name, nbytes, details = self._labels[row[4]]
                where = self._channels[row[3]][0], groups[row[3]]
                times = common(row[1]), common(row[2])
                yield Event(rank, kind, name, *times, *where, row[5], nbytes, details)
            elif kind == "wait":
                where = self._channels[row[3]][0], groups[row[3]]
                yield Event(rank, kind, kind, common(row[1]), common(row[2]), *where)
            elif kind == "action":
                where = self._channels[row[3]][0], groups[row[3]]
                yield Event(rank, kind, row[4], common(row[1]), common(row[2]), *where)
            elif kind in ("step", "phase"):
                yield Event(rank, kind, row[3], common(row[1]), common(row[2]))

    def _rows(self) -> Iterator[list[Any]]:
        with self.path.open(encoding="utf-8") as file:
            next(file)
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:  # the run died while it wrote this
                    return

    def _read_definitions(self) -> None:
        for row in self._rows():
            match row:
                case ["label", number, *label]:
                    self._labels[number] = label
                case ["channel", number, name, lowest, size]:
                    self._channels[number] = name, lowest, size
                case ["clock", local, ahead]:
                    self._clock.append((local, ahead))
                case ["end", lost]:
                    self.complete, self.lost = True, lost
                case ["pipeline", number, name, csv]:
                    self._pipelines[number] = name, csv

    def _groups(self) -> dict[int, str]:
        """Return a text for each communicator: those made of equal ranks are numbered."""
        seen: Counter[tuple[str, int, int]] = Counter()
        found = {}
        for number, channel in sorted(self._channels.items()):
            name, lowest, size = channel
            seen[channel] += 1
            again = f" #{seen[channel]}" if seen[channel] > 1 else ""
            found[number] = f"{name}{again}, {size} from rank {lowest}"
        return found

    def _common(self, local: float) -> float:
        """Return a time of this rank on the common clock."""
        (first, ahead), (last, later) = self._clock[0], self._clock[-1]
        if last > first:
            ahead += (later - ahead) * (local - first) / (last - first)
        return local - ahead - self.header["origin"]


def parts(directory: Path) -> list[Part]:
    """Return the parts in a folder, by rank."""
    return sorted((Part(path) for path in directory.glob(PATTERN)), key=lambda part: part.rank)
