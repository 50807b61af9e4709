"""Prove a schedule right: run all its ranks with sets of contributing ranks in place of numbers.

A value is a bit mask: bit r is set where rank r's data has been added.  ring reduce_scatter on 4
ranks, chunk 0: rank 1 has 0010, rank 2 makes 0110 of it, rank 3 1110, rank 0 1111, which is what a
reduced chunk must be.  Two masks that overlap mean that something is added twice.

Checked: both ends of every message list the same chunks in the same order; every rank ends, with
synchronous sends and so with eager ones; no message has only one end; nothing is read before it is
there, nor in memory that is not shared; nothing is received that is not used; and every rank ends
with exactly the collective's result.  With `ordered`, operands also meet in rank order only.

Each chunk is followed on its own, and one mask operation stands for one addition: the time is
proportional to the number of operations of the schedule, on all ranks together.
"""

from dataclasses import dataclass

from mpipar.schedule.core import CommSchedule, Read, ReadReduce, Send
from mpipar.schedule.rendezvous import Operands, Place, execute, fault


def verify(schedule: CommSchedule, ordered: bool = False) -> None:
    """Check that `schedule` is a correct algorithm for its collective.

    With `ordered`, also check that every sum is taken in rank order.

    Raises ScheduleError naming the round, the ranks and the chunk at fault.
    """

    lost: dict[int, str] = {}  # by chunk: where contributions were replaced, for the error

    def add(place: Place, chunk: int, operands: Operands) -> int:
        total = 0
        for rank, mask in operands:
            if total & mask:
                first = next(source for source, earlier in operands if earlier & mask)
                what = (
                    f"{place}: chunk {chunk} gets the contributions of ranks "
                    f"{_ranks(total & mask)} twice, from rank {first} and from rank {rank}"
                )
                raise fault(schedule, what, "Add every contribution once")
            if ordered and total and mask & -mask != 1 << total.bit_length():
                what = (
                    f"{place}: chunk {chunk} adds the sum of ranks {_ranks(total)} and the sum of "
                    f"ranks {_ranks(mask)}, which is not rank order"
                )
                raise fault(schedule, what, "Add neighbouring runs of ranks, the lower one first")
            total |= mask
        if place.values.get(chunk, 0) & ~total:
            lost.setdefault(chunk, f"; {place} replaced it, and ranks {_ranks(total)} are left")
        return total

    ranks = range(schedule.ranks)
    start = [dict.fromkeys(schedule.initial(rank), 1 << rank) for rank in ranks]
    for place in execute(schedule, start, add):
        for chunk in schedule.final(place.rank):
            _check_result(schedule, place, chunk, lost.get(chunk, ""))


def _check_result(schedule: CommSchedule, place: Place, chunk: int, lost: str) -> None:
    value, expected = place.values.get(chunk), _expected(schedule, chunk)
    if value is None:
        what = f"rank {place.rank} ends without chunk {chunk}"
        raise fault(schedule, what, "Send it there")
    if value != expected:
        what = (
            f"rank {place.rank} ends with the contributions of ranks {_ranks(value)} in chunk "
            f"{chunk}, {place.origin(chunk)}; it should be ranks {_ranks(expected)}{lost}"
        )
        raise fault(schedule, what, "Route what is missing there")


def _expected(schedule: CommSchedule, chunk: int) -> int:
    """Return the mask of the ranks whose data the result in `chunk` is made of."""
    block = chunk // schedule.parts
    if schedule.reduced:
        return (1 << schedule.ranks) - 1
    if schedule.collective in ("broadcast", "scatter"):
        return 1 << schedule.root
    if schedule.collective == "all_to_all":
        return 1 << block // schedule.ranks
    return 1 << block


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


@dataclass(frozen=True)
class Counts:
    """What a schedule costs each rank: messages sent, chunks sent in them, rounds, chunks read."""

    messages: tuple[int, ...]
    chunks: tuple[int, ...]
    rounds: tuple[int, ...]
    reads: tuple[int, ...] = ()


def count(schedule: CommSchedule) -> Counts:
    """Count what each rank sends: `count(schedule).messages[rank]`, and so on.

    All chunks that go to one peer in one round are one message; a round without operations does
    not count.  `reads` is empty where no memory is shared.
    """
    messages, chunks, rounds, reads = [], [], [], []
    for rank in range(schedule.ranks):
        totals = [0, 0, 0]
        reads.append(0)
        for ops in schedule.rounds(rank):
            peers = [op.peer for op in ops if type(op) is Send]
            totals = [totals[0] + len(set(peers)), totals[1] + len(peers), totals[2] + bool(ops)]
            if schedule.shared:
                reads[rank] += sum(type(op) in (Read, ReadReduce) for op in ops)
        messages.append(totals[0])
        chunks.append(totals[1])
        rounds.append(totals[2])
    shared = tuple(reads) if schedule.shared else ()
    return Counts(tuple(messages), tuple(chunks), tuple(rounds), shared)
