"""Prove a schedule right: run all its ranks with sets of contributing ranks in place of numbers.

A value is a bit mask: bit r is set where rank r's data has been added.  ring reduce_scatter on 4
ranks, chunk 0: rank 1 has 0010, rank 2 makes 0110 of it, rank 3 1110, rank 0 1111, which is what a
reduced chunk must be.  Two masks that overlap mean that something is added twice.

Checked: both ends of every message list the same chunks in the same order; every rank ends, with
synchronous sends and so with eager ones; no message has only one end; nothing is read before it is
there; nothing is received that is not used; and every rank ends with exactly the collective's
result.  With `ordered`, operands also meet in rank order only.

Each chunk is followed on its own, and one mask operation stands for one addition: the time is
proportional to the number of operations of the schedule, on all ranks together.
"""

from dataclasses import dataclass

from mpipar.schedule.core import CommSchedule, Send
from mpipar.schedule.rendezvous import Operands, Place, State, execute, fault


def verify(schedule: CommSchedule, ordered: bool = False) -> None:
    """Check that `schedule` is a correct algorithm for its collective.

    With `ordered`, also check that every sum is taken in rank order.

    Raises ScheduleError naming the round, the ranks and the chunk at fault.
    """

    def add(place: Place, chunk: int, operands: Operands) -> int:
        total = 0
        for rank, mask in operands:
            if total & mask:
                what = (
                    f"{place}: chunk {chunk} already has the contributions of ranks "
                    f"{_ranks(total & mask)}, which rank {rank} adds a second time"
                )
                raise fault(schedule, what, "Add every contribution once")
            if ordered and total and mask & -mask != 1 << total.bit_length():
                what = (
                    f"{place}: chunk {chunk} adds the sum of ranks {_ranks(total)} and the sum of "
                    f"ranks {_ranks(mask)}, which is not rank order"
                )
                raise fault(schedule, what, "Add neighbouring runs of ranks, the lower one first")
            total |= mask
        return total

    start = [_start(schedule, rank) for rank in range(schedule.ranks)]
    for rank, values in enumerate(execute(schedule, start, add)):
        for chunk in schedule.final(rank):
            _check_result(schedule, rank, chunk, values.get(chunk))


def _start(schedule: CommSchedule, rank: int) -> State:
    return dict.fromkeys(schedule.initial(rank), 1 << rank)


def _check_result(schedule: CommSchedule, rank: int, chunk: int, value: int | None) -> None:
    if value is None:
        what = f"rank {rank} ends without chunk {chunk}"
        raise fault(schedule, what, "Send it there")
    expected = _expected(schedule, chunk)
    if value != expected:
        what = (
            f"rank {rank} ends with the contributions of ranks {_ranks(value)} in chunk {chunk}; "
            f"it should be ranks {_ranks(expected)}"
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
    """What a schedule costs each rank: messages sent, chunks sent in them, and rounds."""

    messages: tuple[int, ...]
    chunks: tuple[int, ...]
    rounds: tuple[int, ...]


def count(schedule: CommSchedule) -> Counts:
    """Count what each rank sends: `count(schedule).messages[rank]`, and so on.

    All chunks that go to one peer in one round are one message; a round without operations does
    not count.
    """
    messages, chunks, rounds = [], [], []
    for rank in range(schedule.ranks):
        totals = [0, 0, 0]
        for ops in schedule.rounds(rank):
            peers = [op.peer for op in ops if type(op) is Send]
            totals = [totals[0] + len(set(peers)), totals[1] + len(peers), totals[2] + bool(ops)]
        messages.append(totals[0])
        chunks.append(totals[1])
        rounds.append(totals[2])
    return Counts(tuple(messages), tuple(chunks), tuple(rounds))
