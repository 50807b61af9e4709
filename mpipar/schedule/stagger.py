"""Cut the vector into k parts that follow one another two rounds apart: a pipeline.

A lowering pass, for schedules whose rounds use different links in turn.  The two-level all_reduce
on two nodes has four rounds: inside the nodes, across, across, inside.  In 3 parts:

    part 0    inside   across   across   inside
    part 1                      inside   across   across   inside
    part 2                                        inside   across   across   inside

The links between the nodes are then busy in all rounds but the first and the last, and what goes
on inside the nodes goes on meanwhile.  Parts are two rounds apart, not one: an all_reduce goes back
the way it came, so its i-th round and the i-th from the end have the same peers, and as many rounds
before one as behind the other.  An even distance never lets those two meet, in which a message
would mix what is still to be added with what is done.

Part i has the chunks i*c .. i*c + c-1 of c before, so each part is in one piece.  Every rank has to
number its rounds alike (an empty round counts): what is sent in a round is received in that round.

Cost: where a is the time inside the nodes and b that across, b + a/k instead of b + a if b is the
longer, and 2 (k - 1) rounds more.
"""

from collections import deque
from collections.abc import Iterator

from mpipar.errors import ConfigError, explain
from mpipar.schedule.core import CommSchedule, Round
from mpipar.schedule.segment import segment

APART = 2  # rounds between the beginnings of two parts
CUTS = ("all_reduce", "broadcast", "reduce")  # their chunks are cuts of one vector


def stagger(schedule: CommSchedule, k: int) -> CommSchedule:
    """Return the schedule on `k` parts of the vector, each begun two rounds after the one before.

    Raises ConfigError if k < 1, and for a collective whose chunks are not cuts of one vector.
    """
    if k < 1:
        raise ConfigError(explain("k", k, "a vector has at least one part", "Pass k >= 1"))
    if schedule.collective not in CUTS or schedule.parts > 1:
        rule = f"its chunks must be cuts of one vector, as those of {', '.join(CUTS)}"
        raise ConfigError(explain("schedule", schedule.name, rule, "Use segment"))
    if k == 1:
        return schedule
    chunks, delay = schedule.chunks, APART * (k - 1)

    def rounds(rank: int) -> Iterator[Round]:
        nothing: tuple[Round, ...] = ((),) * delay
        latest = deque(nothing, delay + 1)  # the round that part 0 is in is the last one
        for begun in (*schedule.rounds(rank), *nothing):
            latest.append(begun)
            yield tuple(
                op._replace(chunk=part * chunks + op.chunk)
                for part in range(k)
                for op in latest[delay - APART * part]
            )

    return schedule.with_rounds(rounds, chunks=chunks * k, symmetry=schedule.symmetry)


def cut(schedule: CommSchedule, k: int) -> CommSchedule:
    """Return the schedule in `k` parts: staggered if it has two levels, else in segments.

    Raises ConfigError if k < 1.
    """
    return (stagger if schedule.algorithm == "hierarchical" else segment)(schedule, k)
