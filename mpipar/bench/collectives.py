"""`mpipar bench collectives`: our schedules beside the MPI library's calls.

The peer of all_reduce is the library's blocking in-place Allreduce through mpi4py, called directly;
of the other collectives the library's non-blocking call on the same buffers (`algorithm="mpi"`).
Ours is `Communicator.all_reduce(x, out=out)` and its like, on private arrays; "window" is an
all_reduce of buffers that lie in node-shared memory, `comm.window(n).all_reduce()`, and leaves the
result once in a node.  A ratio above 1 means less time than the library's.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar import schedule
from mpipar.bench.timing import interleaved
from mpipar.comm.calls import algorithms
from mpipar.comm.choice import Table
from mpipar.parallel.communicator import Communicator

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
PEER = "library"
WINDOW = "window"


@dataclass(frozen=True)
class Row:
    """One measurement, as it is written to JSON."""

    collective: str
    algorithm: str
    bytes: int
    ranks: int
    buffers: str
    median_s: float
    mpi_median_s: float
    ratio: float


def measure(
    comm: Communicator,
    collective: str,
    nbytes: int,
    only: Sequence[str] = (),
    repeats: int = 3,
    others: Mapping[str, Callable[[], Any]] | None = None,
) -> list[Row]:
    """Time every algorithm of a collective on float32 arrays of `nbytes` in all.

    `others` are calls of other libraries to time in between, by name.
    """
    names = [n for n in ("auto", *algorithms(collective)) if not only or n in only]
    call = _CALLS[collective](comm, nbytes)
    candidates: dict[str, Callable[[], Any]] = {PEER: call(None)}
    candidates |= {name: call(name) for name in names}
    candidates |= others or {}
    with ExitStack() as stack:
        if collective == "all_reduce" and (not only or WINDOW in only):
            window = stack.enter_context(comm.window(nbytes // 4, slots=1))
            if window.shared:
                candidates[WINDOW] = window.all_reduce
        times = interleaved(comm.process_group.raw, candidates, nbytes, repeats)
    peer = times.pop(PEER)
    return [
        Row(collective, name, nbytes, comm.size, _buffers(name), seconds, peer, peer / seconds)
        for name, seconds in times.items()
    ]


def _buffers(name: str) -> str:
    return "window" if name == WINDOW else "private"


def tune(rows: Sequence[Row]) -> Table:
    """Return the table in which "auto" takes the fastest algorithm of each measured size."""
    best: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        if row.algorithm not in algorithms(row.collective):
            continue  # "auto" itself, and what "auto" cannot take
        sizes = best.setdefault((row.collective, row.ranks), {})
        if row.bytes not in sizes or row.median_s < sizes[row.bytes].median_s:
            sizes[row.bytes] = row
    return Table({key: _limits(sizes) for key, sizes in best.items()})


def _limits(sizes: dict[int, Row]) -> tuple[tuple[float, str], ...]:
    """Each measured size stands for the sizes up to the geometric mean with the next one."""
    ordered = sorted(sizes)
    limits = [int((a * b) ** 0.5) for a, b in itertools.pairwise(ordered)]
    pairs = [
        (limit, sizes[n].algorithm)
        for n, limit in zip(ordered, [*limits, float("inf")], strict=True)
    ]
    return tuple(
        pair for pair, after in zip(pairs, [*pairs[1:], (0.0, "")], strict=True)
        if pair[1] != after[1]
    )  # fmt: skip


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain dicts."""
    return [asdict(row) for row in rows]


def _all_reduce(comm: Communicator, nbytes: int) -> Callable[[str | None], Callable[[], Any]]:
    x, out = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    raw = comm.process_group.raw
    if nbytes <= 1024:  # the raw call as a user writes it
        peer: Callable[[], Any] = lambda: raw.Allreduce(x, out)  # noqa: E731
    else:
        peer = lambda: raw.Allreduce(MPI.IN_PLACE, out)  # noqa: E731
    return lambda name: (
        peer if name is None else lambda: comm.all_reduce(x, out=out, algorithm=name)
    )


def _reduce_scatter(comm: Communicator, nbytes: int) -> Callable[[str | None], Callable[[], Any]]:
    x = np.zeros((comm.size, max(1, nbytes // 4 // comm.size)), np.float32)
    out = np.zeros((1, x.shape[1]), np.float32)
    return lambda name: lambda: comm.reduce_scatter(x, dim=0, out=out, algorithm=name or "mpi")


def _all_gather(comm: Communicator, nbytes: int) -> Callable[[str | None], Callable[[], Any]]:
    x = np.zeros(max(1, nbytes // 4 // comm.size), np.float32)
    out = np.zeros(x.size * comm.size, np.float32)
    return lambda name: lambda: comm.all_gather(x, out=out, algorithm=name or "mpi")


def _all_to_all(comm: Communicator, nbytes: int) -> Callable[[str | None], Callable[[], Any]]:
    x = np.zeros((comm.size, max(1, nbytes // 4 // comm.size)), np.float32)
    return lambda name: lambda: comm.all_to_all(x, 0, 1, algorithm=name or "mpi")


def _broadcast(comm: Communicator, nbytes: int) -> Callable[[str | None], Callable[[], Any]]:
    x, out = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    return lambda name: lambda: comm.broadcast(x, out=out, algorithm=name or "mpi")


_CALLS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
assert set(_CALLS) == set(COLLECTIVES) <= set(schedule.generators)
