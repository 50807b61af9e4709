"""Which algorithm "auto" takes, and how finely its messages are cut.

The choice depends only on values that the whole group agrees on: the collective, the bytes, the
number of ranks and the node layout.  A table measured by `mpipar bench collectives --tune` replaces
the built-in rules where it has an entry; rank 0 reads it and broadcasts it.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mpipar.comm.node import Nodes
from mpipar.errors import ConfigError, explain
from mpipar.schedule import COLLECTIVES, algorithms

SEGMENT_BYTES = 1 << 22  # smaller ones cost more switching between ranks than they save
MOST_SEGMENTS = 64
PART_BYTES, MOST_PARTS = 1 << 19, 4  # of a part, what a rank sends to another node in a round
SMALL_BYTES = 1 << 16  # where the number of rounds costs more than the bytes
SMALL_ACROSS_BYTES = 1 << 13  # of several nodes, whose ranks then all send these bytes to the next
FEW_RANKS = 8


@dataclass(frozen=True)
class Table:
    """Measured choices: for (collective, ranks), pairs of (up to this many bytes, algorithm)."""

    rows: dict[tuple[str, int], tuple[tuple[float, str], ...]]

    def find(self, collective: str, ranks: int, nbytes: int) -> str | None:
        """Return the measured algorithm, or None where nothing was measured."""
        for limit, algorithm in self.rows.get((collective, ranks), ()):
            if nbytes <= limit:
                return algorithm
        return None


def table_path() -> Path:
    """Return where the machine's table lies: MPIPAR_TUNING, else the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(os.environ.get("MPIPAR_TUNING", str(Path(cache) / "mpipar" / "tuning.json")))


def read_table(path: Path) -> Table:
    """Read a table; a missing file is an empty table.

    Raises ConfigError if the file is not a table, or names what does not exist.
    """
    if not path.is_file():
        return Table({})
    fix = "Delete it, or measure with mpipar bench collectives --tune"
    try:
        rows = json.loads(path.read_text())["rows"]
        table = Table(
            {
                (row["collective"], int(row["ranks"])): tuple(
                    (float("inf") if limit is None else float(limit), str(algorithm))
                    for limit, algorithm in row["choices"]
                )
                for row in rows
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        rule = "it must be a tuning table"
        raise ConfigError(explain("MPIPAR_TUNING", str(path), rule, fix)) from None
    for (collective, _), pairs in table.rows.items():
        known = (*algorithms(collective), "mpi") if collective in COLLECTIVES else ()
        for _, name in pairs:
            if name not in known:
                rule = f"there is no algorithm {name!r} for {collective!r}, which it names"
                raise ConfigError(explain("MPIPAR_TUNING", str(path), rule, fix))
    return table


def write_table(path: Path, table: Table) -> None:
    """Write a table where `read_table` finds it."""
    rows = [
        {
            "collective": collective,
            "ranks": ranks,
            "choices": [[None if limit == float("inf") else limit, name] for limit, name in pairs],
        }
        for (collective, ranks), pairs in sorted(table.rows.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def choose(collective: str, nbytes: int, ranks: int, nodes: Nodes, table: Table) -> str:
    """Return the algorithm for a collective on `nbytes` bytes (the whole vector, all blocks)."""
    measured = table.find(collective, ranks, nbytes)
    if measured is not None:
        return measured
    small = nbytes <= SMALL_BYTES
    few = ranks <= FEW_RANKS and nodes.count == 1  # all at once: the fewest rounds
    match collective:
        case "all_reduce":
            levels = nodes.count > 1 and nodes.sizes is not None and nodes.count < ranks
            if levels and nbytes > SMALL_ACROSS_BYTES:
                return "hierarchical"
            if small:
                return "recursive_doubling"
            return "direct" if few else "ring"
        case "reduce_scatter":
            return "direct" if few else "recursive_halving" if small else "ring"
        case "all_gather":
            return "direct" if few else "bruck" if small else "ring"
        case "all_to_all":
            return "bruck" if nbytes <= 256 * ranks and ranks > 8 else "pairwise"
        case "broadcast":
            return "tree" if small or ranks <= 2 else "scatter_all_gather"
        case "barrier":
            return "dissemination"
        case "shift":
            return "ring"
    return "tree" if small else "linear"


def segments(chunk_bytes: int, segment_bytes: int | None, crowded: bool) -> int:
    """Return how many parts a chunk is cut into, so that adding overlaps with receiving.

    On a crowded node, with more ranks than cores, nothing overlaps and each part costs a switch
    between ranks: there a chunk stays whole, unless `segment_bytes` says otherwise.
    """
    if segment_bytes is None and crowded:
        return 1
    target = SEGMENT_BYTES if segment_bytes is None else segment_bytes
    return max(1, min(MOST_SEGMENTS, -(-chunk_bytes // max(1, target))))


def parts(chunk_bytes: int, segment_bytes: int | None, crowded: bool) -> int:
    """Return how many parts of a two-level all_reduce follow one another (see `stagger`).

    chunk_bytes: what a rank sends to another node in a round without.  On a crowded node the whole
    vector is one part, for the reason that `segments` has.
    """
    if segment_bytes is not None:
        return max(1, min(MOST_SEGMENTS, -(-chunk_bytes // segment_bytes)))
    return 1 if crowded else max(1, min(MOST_PARTS, chunk_bytes // PART_BYTES))
