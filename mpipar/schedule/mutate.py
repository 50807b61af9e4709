"""Every schedule that differs from a given one in a single operation.

`verify` is only worth something if it rejects what is wrong.  For each operation of each rank:

    dropped       left out
    peer          with the next rank in place of its peer
    chunk         on the next chunk
    kind          Recv for RecvReduce, Read for ReadReduce, and the other way round
    late          moved to the next round of that rank
    early         moved to the round before
    twice         done a second time in the same round

Most mutants are wrong.  Some are not: a receive that may as well happen a round later.  A mutant
that `verify` accepts gives the right result, and is thereby proved equivalent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpipar.errors import ScheduleError
from mpipar.schedule.core import CommSchedule, Op, Read, ReadReduce, Recv, RecvReduce, Round, Send
from mpipar.schedule.text import describe_op
from mpipar.schedule.verify import verify

_OTHER_KIND: dict[type, Callable[[int, int], Op]] = {
    Recv: RecvReduce,
    RecvReduce: Recv,
    Read: ReadReduce,
    ReadReduce: Read,
}

Program = list[list[Op]]  # the rounds of one rank


@dataclass(frozen=True)
class Mutant:
    """A schedule with one operation changed, and where and how it was changed."""

    schedule: CommSchedule
    rank: int
    round: int
    op: Op
    change: str

    def __str__(self) -> str:
        """Return the change in words."""
        op = describe_op(self.op)
        return (
            f"{self.schedule.name}: {self.change} of {op}, rank {self.rank} in round {self.round}"
        )


def mutants(schedule: CommSchedule) -> Iterator[Mutant]:
    """Yield every schedule that differs from `schedule` in one operation of one rank."""
    for rank in range(schedule.ranks):
        program = [list(ops) for ops in schedule.rounds(rank)]
        for number, ops in enumerate(program):
            for i, op in enumerate(ops):
                for change, rounds in _changes(schedule, rank, program, number, i):
                    yield Mutant(_with(schedule, rank, rounds), rank, number, op, change)


def survivors(schedule: CommSchedule) -> list[Mutant]:
    """Return the mutants that `verify` accepts: those that are equivalent to `schedule`."""
    found = []
    for mutant in mutants(schedule):
        try:
            verify(mutant.schedule)
        except ScheduleError:
            continue
        found.append(mutant)
    return found


def _changes(
    schedule: CommSchedule, rank: int, program: Program, number: int, i: int
) -> Iterator[tuple[str, Program]]:
    """Yield (the name of the change, the rank's new rounds) for operation i of a round."""
    ops = program[number]
    op = ops[i]
    without = ops[:i] + ops[i + 1 :]

    def put(*new: Op) -> Program:
        return _replaced(program, number, ops[:i] + list(new) + ops[i + 1 :])

    yield "dropped", put()
    others = [r for r in range(schedule.ranks) if r not in (rank, op.peer)]
    if others:
        peer = min(others, key=lambda r: (r - op.peer) % schedule.ranks)
        yield "peer", put(op._replace(peer=peer))
    if schedule.chunks > 1:
        yield "chunk", put(op._replace(chunk=(op.chunk + 1) % schedule.chunks))
    if type(op) is not Send:
        yield "kind", put(_OTHER_KIND[type(op)](*op))
    if number + 1 < len(program):
        late = _replaced(program, number, without)
        yield "late", _replaced(late, number + 1, [op, *program[number + 1]])
    if number > 0:
        early = _replaced(program, number, without)
        yield "early", _replaced(early, number - 1, [*program[number - 1], op])
    yield "twice", put(op, op)


def _replaced(program: Program, number: int, ops: list[Op]) -> Program:
    return [*program[:number], ops, *program[number + 1 :]]


def _with(schedule: CommSchedule, rank: int, program: Program) -> CommSchedule:
    def rounds(r: int) -> Iterator[Round]:
        return map(tuple, program) if r == rank else schedule.rounds(r)

    return schedule.with_rounds(rounds)
