"""Which tokens of a sequence each rank of a context-parallel group holds, and who attends to whom.

16 tokens over 4 ranks; a rank's tokens are in ascending order of their positions:

    contiguous, ulysses   0..3 | 4..7 | 8..11 | 12..15           partition.blocks
    zigzag, hybrid        0 1 14 15 | 2 3 12 13 | 4 5 10 11 | 6..9    partition.zigzag

Under a causal mask the first makes the last rank of a ring work the most (2 - 1/p times the mean).
The second gives every rank an early and a late block, so the same work (Llama 3, section 3.3.2).
Ulysses gathers the whole sequence, so its order does not matter for the work.

A rank's positions are a few ranges.  Those of two ranks never overlap, so of the keys of one rank,
in ascending order, a query sees a prefix: all keys, none, those before its own range, or, where the
keys are its own rank's, those up to itself.  A `Task` states that for some rows of queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpipar import partition
from mpipar.errors import ConfigError, explain

LAYOUTS = ("contiguous", "zigzag", "ulysses", "hybrid")
Range = tuple[int, int]  # positions start..stop-1
Ranges = tuple[Range, ...]  # ascending, not adjacent, none empty


def context_positions(n: int, size: int, rank: int, layout: str = "zigzag") -> np.ndarray:
    """Return the positions, in a sequence of n tokens, of the tokens of one rank: int64, ascending.

    size, rank: of the context-parallel group, `mesh.cp`.  layout: one of LAYOUTS, as it is called
    by `mpipar train --cp-layout`.  Take the rank's tokens and targets with them
    (`tokens[:, positions]`) and pass them to the model as `positions`.

    Raises ConfigError for an unknown layout or a rank that the group does not have.
    """
    if not 0 <= rank < size:
        rule = f"it must be one of the {size} ranks of the context-parallel group"
        raise ConfigError(explain("rank", rank, rule, "Pass mesh.cp.size and mesh.cp.rank"))
    return positions_of(ranges_of(n, size, rank, layout))


def ulysses_degree(size: int) -> int:
    """Return how many neighbours the layout "hybrid" takes of `size` ranks, if it is not told.

    The divisor of size next to its square root, not above it.
    """
    return max(d for d in range(1, size + 1) if size % d == 0 and d * d <= size)


def require_layout(layout: object, known: Sequence[str] = LAYOUTS) -> None:
    """Raise ConfigError for an unknown layout."""
    if layout not in known:
        rule = f"it must be one of {', '.join(known)}"
        raise ConfigError(explain("layout", layout, rule, "Choose one of them"))


def ranges_of(n: int, size: int, rank: int, layout: str) -> Ranges:
    """Return the ranges of positions that a rank holds."""
    require_layout(layout)
    if layout in ("contiguous", "ulysses"):
        return merged([partition.block(n, size, rank)])
    return merged(partition.zigzag(n, size)[rank])


def merged(cuts: Sequence[slice]) -> Ranges:
    """Return slices as ranges: sorted, neighbours joined, empty ones left out."""
    joined: list[Range] = []
    for start, stop in sorted((cut.start, cut.stop) for cut in cuts if cut.start < cut.stop):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def length_of(ranges: Ranges) -> int:
    """Return the number of tokens in the ranges."""
    return sum(stop - start for start, stop in ranges)


def positions_of(ranges: Ranges) -> np.ndarray:
    """Return the positions in the ranges, int64."""
    parts = [np.arange(start, stop) for start, stop in ranges]
    return np.concatenate([np.empty(0, np.int64), *parts])


class Task(NamedTuple):
    """Queries `rows` of a rank against the first `seen` keys of a block of keys.

    ahead: None if every query sees all of these keys; else query i of the rows sees the keys up to
    number ahead + i.
    """

    rows: slice
    seen: int
    ahead: int | None

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key it computes: its work."""
        count = self.rows.stop - self.rows.start
        if self.ahead is None:
            return count * self.seen
        return count * self.ahead + count * (count + 1) // 2


def tasks(queries: Ranges, keys: Ranges, causal: bool) -> list[Task]:
    """Return what the queries of one rank compute with the keys of another (or of itself).

    Every row is in one task at most; one that sees none of the keys is in no task.
    """
    if not causal:
        whole = Task(slice(0, length_of(queries)), length_of(keys), None)
        return [whole] if whole.pairs else []
    found: list[Task] = []
    at = 0
    for start, stop in queries:
        rows = slice(at, at + stop - start)
        at = rows.stop
        before = length_of(tuple(one for one in keys if one[1] <= start))
        if (start, stop) in keys:
            found.append(Task(rows, before + stop - start, before))
        elif found and found[-1][1:] == (before, None):
            found[-1] = Task(slice(found[-1].rows.start, rows.stop), before, None)
        elif before:
            found.append(Task(rows, before, None))
    return found
