"""The adjoint of a schedule: the same messages, sent back in reverse order of time.

A schedule is a linear map from what the ranks start with to what they end with.  The adjoint takes
gradients of the results back to gradients of the inputs, so that <A x, y> = <x, A' y>:

    forward, in a round                  backward, in the round that mirrors it
    Send(peer, c)                        the gradient comes back: RecvReduce(peer, c)
    Recv / RecvReduce(peer, c)           the gradient of what came goes back: Send(peer, c)
    the own value lives on               its gradient stays: it is added to
    the own value was replaced or dead   nothing to add to: the first receive is a Recv

all_gather and reduce_scatter are each other's adjoints, so are broadcast and reduce, gather and
scatter; all_reduce and barrier are their own, shift(k) is shift(-k)'s, and all_to_all's sends the
blocks back: what went from i to j is now the block from j to i.  The adjoint sends as many chunks
as the schedule; the ring all_gather's is a ring reduce_scatter whose sums travel the other way.
"""

from collections.abc import Callable, Iterator

from mpipar.errors import ScheduleError
from mpipar.schedule.core import CommSchedule, Op, Recv, RecvReduce, Round, Send
from mpipar.schedule.rendezvous import fault
from mpipar.schedule.text import describe_op

ADJOINT = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    "barrier": "barrier",
    "shift": "shift",
}


def transpose(schedule: CommSchedule) -> CommSchedule:
    """Return the adjoint: a schedule of the adjoint collective, on as many ranks and chunks.

    A rank's rounds are read to the end before the first is yielded.  A barrier moves no data and is
    returned as it is.

    Raises ScheduleError for a schedule whose ranks read each other's memory: the adjoint would have
    to write there.  And, when rounds are made, for a message that brings what nobody uses.
    """
    if schedule.shared:
        what = "ranks read each other's memory, where its adjoint would have to write"
        raise fault(schedule, what, "Transpose the hierarchical schedule, which sends the same")
    if schedule.collective == "barrier":
        return schedule
    rename = _renaming(schedule)

    def rounds(rank: int) -> Iterator[Round]:
        live = set(schedule.final(rank))  # the chunks that have a gradient
        for number, ops in reversed(list(enumerate(schedule.rounds(rank)))):
            back = _mirror(ops, live)
            if back is None:
                raise _dead(schedule, rank, number, ops, live)
            yield tuple(op._replace(chunk=rename(op.chunk)) for op in back)

    collective = ADJOINT[schedule.collective]
    suffix = "_transposed"
    return schedule.with_rounds(
        rounds,
        collective=collective,
        algorithm=schedule.algorithm.removesuffix(suffix)
        if schedule.algorithm.endswith(suffix)
        else schedule.algorithm + suffix,
        offset=-schedule.offset if collective == "shift" else schedule.offset,
    )


def _mirror(ops: Round, live: set[int]) -> Round | None:
    """Return a round's adjoint and bring `live` to the time before the round.

    None if the round receives a chunk that has no gradient.
    """
    replaced = {op.chunk for op in ops if type(op) is Recv}
    sent = {op.chunk for op in ops if type(op) is Send}
    empty = sent & (replaced | (sent - live))  # nothing there to add to
    back: list[Op] = []
    for op in ops:
        if type(op) is not Send:
            if op.chunk not in live:
                return None
            back.append(Send(*op))
        elif op.chunk in empty:
            empty.discard(op.chunk)
            back.append(Recv(*op))
        else:
            back.append(RecvReduce(*op))
    live -= replaced
    live |= sent
    return tuple(back)


def _renaming(schedule: CommSchedule) -> Callable[[int], int]:
    """Return the map from a chunk's id to its id in the adjoint collective."""
    p, parts = schedule.ranks, schedule.parts

    def swap(chunk: int) -> int:
        block, part = divmod(chunk, parts)
        source, target = divmod(block, p)
        return (target * p + source) * parts + part

    def advance(chunk: int) -> int:
        block, part = divmod(chunk, parts)
        return (block + schedule.offset) % p * parts + part

    return {"all_to_all": swap, "shift": advance}.get(schedule.collective, int)


def _dead(
    schedule: CommSchedule, rank: int, number: int, ops: Round, live: set[int]
) -> ScheduleError:
    dead = [describe_op(op) for op in ops if type(op) is not Send and op.chunk not in live]
    what = f"rank {rank} in round {number} receives {' '.join(dead)}, which nobody uses"
    return fault(schedule, what, "Run verify on it")
