"""What a schedule is: for each rank, rounds of operations on numbered chunks.

A chunk id names a piece of data, never bytes; a peer is a rank of the group, never a communicator.
Each rank holds at most one value under each chunk id.  A round is a tuple of operations that are
posted together:

    Send(peer, chunk)         send the value that the chunk had before this round
    Recv(peer, chunk)         the received value replaces the chunk's
    RecvReduce(peer, chunk)   the received value is added to the chunk's
    Read(peer, chunk)         the peer's value, in memory both can read, replaces the chunk's
    ReadReduce(peer, chunk)   the peer's value is added to the chunk's

All operands that meet in one chunk in one round are added in rank order: the rank's own value (if
no Recv or Read replaces it) takes its own rank's place, every other one that of its peer.  A direct
reduction is thereby a sum in rank order, and a tree keeps the order of a non-commutative operation.

All that one rank sends to one peer in a round travels as ONE message, in the order listed; the
receiver lists the same chunks in the same order.  Messages from one rank to another are matched in
the order sent (MPI's non-overtaking rule), so the two ends need not number their rounds alike.

Two-rank all_reduce, both chunks exchanged and added:

    rank 0: (Send(1, 0), Send(1, 1), RecvReduce(1, 0), RecvReduce(1, 1))
    rank 1: (Send(0, 0), Send(0, 1), RecvReduce(0, 0), RecvReduce(0, 1))

What is read is what the peer's chunk holds at the start of the peer's round of the same number, or
holds in the end if the peer has fewer rounds.  The reader waits until the peer is there; the peer
waits for nobody, and keeps the value until it has been read.  So where ranks read, all of them
number their rounds alike (an empty round counts), and the schedule's `shared` says whose memory
they share.

Two-rank all_reduce in shared memory, each rank adding one chunk:

    rank 0: (ReadReduce(1, 0),), (Read(1, 1),)
    rank 1: (ReadReduce(0, 1),), (Read(0, 0),)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpipar.errors import ScheduleError, explain


class Send(NamedTuple):
    """Send a chunk's value to `peer`."""

    peer: int
    chunk: int


class Recv(NamedTuple):
    """Receive a chunk's value from `peer`; it replaces the old one."""

    peer: int
    chunk: int


class RecvReduce(NamedTuple):
    """Receive a value from `peer` and add it to the chunk's, in rank order."""

    peer: int
    chunk: int


class Read(NamedTuple):
    """Take the value that a chunk of `peer` has at the start of this round, in shared memory."""

    peer: int
    chunk: int


class ReadReduce(NamedTuple):
    """Add the value that a chunk of `peer` has at the start of this round, in rank order."""

    peer: int
    chunk: int


Op = Send | Recv | RecvReduce | Read | ReadReduce
Round = tuple[Op, ...]

# The collectives: what each rank holds before and after.  p ranks, `parts` chunks a block.
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "shift",
)


@dataclass(frozen=True)
class Symmetry:
    """Classes of ranks that behave alike in time, so that one of each stands for all of its class.

    `classes` lists (representative, how many ranks it stands for).  `view(rank, peer)` returns
    (representative, peer'): where `rank` deals with `peer`, its representative deals with `peer'`.
    So a message from `rank` to `peer` takes the same time as the representative's to `peer'`.

    `exact` says that every class is an orbit of a group that maps the schedule onto itself (a
    rotation, an exclusive or).  Otherwise the members of a class are alike in time only, and one
    representative's message may stand for several that others receive.

    Example: the ring on p ranks has one class, `view(rank, peer) = (0, (peer - rank) % p)`.
    """

    classes: tuple[tuple[int, int], ...]
    view: Callable[[int, int], tuple[int, int]]
    exact: bool = True


# Given the ranks of each node, the classes of a schedule, or None where it has none for the layout.
Declare = Callable[[tuple[int, ...]], Symmetry | None]


@dataclass(frozen=True)
class CommSchedule:
    """An algorithm for one collective on `ranks` ranks, as data.

    `chunks` is the number of chunk ids in all.  `make(rank)` returns that rank's rounds, lazily.
    `root` is the root of broadcast, reduce, gather and scatter (0 elsewhere), `offset` the distance
    of a shift.  `parts` counts the segments that `segment` cut every original chunk into.
    `shared` counts the ranks of each node (consecutive ranks) if those of a node read each other's
    memory; all ranks then number their rounds alike.
    `symmetry` declares for `simulate` which ranks behave alike, given the ranks of each node.

    Blocks are what the collective's meaning is stated in; chunk ids map to them by
    `block = chunk // parts`:

    | collective     | blocks                               | r starts with    | ends with      |
    |----------------|--------------------------------------|------------------|----------------|
    | all_reduce     | `blocks` equal cuts of the vector    | all              | all, reduced   |
    | reduce_scatter | block i is what rank i ends with     | all              | r, reduced     |
    | all_gather     | block i is what rank i brings        | r                | all            |
    | all_to_all     | block i*p + j goes from i to j       | r*p + j          | i*p + r        |
    | broadcast      | cuts of the vector                   | all, on the root | all            |
    | reduce         | cuts of the vector                   | all              | all, on root   |
    | gather         | block i is what rank i brings        | r                | all, on root   |
    | scatter        | block i is what rank i ends with     | all, on root     | r              |
    | barrier        | block i: "i has arrived" (no bytes)  | r                | all            |
    | shift          | block i is what rank i brings        | r                | (r-offset) % p |
    """

    collective: str
    algorithm: str
    ranks: int
    chunks: int
    make: Callable[[int], Iterator[Round]]
    root: int = 0
    offset: int = 1
    parts: int = 1
    shared: tuple[int, ...] = ()
    symmetry: Declare | None = field(default=None, compare=False)

    def rounds(self, rank: int) -> Iterator[Round]:
        """Yield the rounds of `rank`; a rank with nothing to do in a round may leave it out."""
        if not 0 <= rank < self.ranks:
            raise ScheduleError(
                explain("rank", rank, f"ranks are 0..{self.ranks - 1}", "Pass one of them")
            )
        return self.make(rank)

    @property
    def name(self) -> str:
        """The collective and the algorithm, as `all_reduce/ring`."""
        return f"{self.collective}/{self.algorithm}"

    @property
    def reduced(self) -> bool:
        """Whether values are added on the way: all_reduce, reduce_scatter and reduce."""
        return self.collective in ("all_reduce", "reduce_scatter", "reduce")

    @property
    def blocks(self) -> int:
        """The number of blocks: chunk ids before `segment`."""
        return self.chunks // self.parts

    def initial(self, rank: int) -> list[int]:
        """Return the chunk ids that `rank` holds before the first round, ascending."""
        return self._expand(_held(self, rank, before=True))

    def final(self, rank: int) -> list[int]:
        """Return the chunk ids whose result `rank` must hold after the last round, ascending."""
        return self._expand(_held(self, rank, before=False))

    def _expand(self, blocks: range | list[int]) -> list[int]:
        return [block * self.parts + part for block in blocks for part in range(self.parts)]

    def with_rounds(
        self, make: Callable[[int], Iterator[Round]], **changes: object
    ) -> "CommSchedule":
        """Return a copy with other rounds (and other fields, if given), without `symmetry`."""
        return replace(self, **{"make": make, "symmetry": None, **changes})  # type: ignore[arg-type]


def _held(schedule: CommSchedule, rank: int, before: bool) -> range | list[int]:
    p, everything = schedule.ranks, range(schedule.blocks)
    on_root = everything if rank == schedule.root else range(0)
    own = range(rank, rank + 1)
    match schedule.collective, before:
        case ("all_reduce", _) | ("reduce_scatter", True) | ("all_gather" | "barrier", False):
            return everything
        case ("broadcast", False) | ("reduce", True):
            return everything
        case ("broadcast" | "scatter", True) | ("reduce" | "gather", False):
            return on_root
        case ("all_gather" | "barrier" | "gather" | "shift", True):
            return own
        case ("reduce_scatter" | "scatter", False):
            return own
        case ("all_to_all", True):
            return range(rank * p, rank * p + p)
        case ("all_to_all", False):
            return range(rank, p * p, p)
        case ("shift", False):
            return [(rank - schedule.offset) % p]
    raise ScheduleError(
        explain(
            "collective",
            schedule.collective,
            f"it must be one of {', '.join(COLLECTIVES)}",
            "Choose one",
        )
    )
