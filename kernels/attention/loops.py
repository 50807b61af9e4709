"""p = e^(s - head) where a query sees the key, else 0: one pass over a tile of attention's scores.

A tile's scores (rows, seen) are those of `tile` queries after each other for every head: row r
belongs to query r mod tile.  All queries see the first `by_all` keys, and query i sees
ahead + i + 1 more of them.  What stands in the scores of hidden keys does not matter.
"""

import numpy as np

from mpipar.kernels.native import Floats, loop
from mpipar.kernels.native_math import ZERO, exp


def reference(s: np.ndarray, tile: int, by_all: int, ahead: int) -> np.ndarray:
    """Return e^s (rows, seen) in float64, 0 where the key is hidden."""
    query, key = np.arange(len(s))[:, None] % tile, np.arange(s.shape[1])
    return np.where(key < by_all + np.maximum(ahead + query + 1, 0), np.exp(s.astype("f8")), 0)


@loop
def forward_loop(
    s: Floats, total: Floats, rows: int, seen: int, tile: int, by_all: int, ahead: int
) -> None:
    """Write e^s over s, and the sums of its rows."""
    for r in range(rows):
        at, both = r * seen, ZERO
        visible = min(by_all + max(ahead + r % tile + 1, 0), seen)
        for j in range(seen):
            e = exp(s[at + j]) if j < visible else ZERO
            s[at + j] = e
            both += e
        total[r] = both


@loop
def backward_loop(
    s: Floats, ds: Floats, head: Floats, rows: int, seen: int, tile: int, by_all: int, ahead: int
) -> None:
    """Write p over s, and ds * p over ds."""
    for r in range(rows):
        at, top = r * seen, head[r]
        visible = min(by_all + max(ahead + r % tile + 1, 0), seen)
        for j in range(seen):
            p = exp(s[at + j] - top) if j < visible else ZERO
            s[at + j] = p
            ds[at + j] *= p
