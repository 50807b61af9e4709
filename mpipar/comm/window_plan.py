"""What one rank does in an all_reduce in shared memory, from the schedule all_reduce/window.

    own       the elements that it adds up: of all ranks of its node, in rank order
    rounds    the messages by which the owners of the same elements on other nodes add theirs

The chunks that a rank does not read from another are its own; they lie one behind the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpipar import schedule as schedules
from mpipar.comm import choice
from mpipar.comm.plan import Layout, Plan, compile_plan
from mpipar.partition import blocks, offsets
from mpipar.schedule import CommSchedule, Read, Recv, RecvReduce, Round, Send, segment


@dataclass(frozen=True)
class WindowPlan:
    """The elements that a rank adds up, and its messages, if there are other nodes.

    Positions in the messages' plan count from the first own element, in a vector that is reduced in
    place.
    """

    own: slice
    messages: Plan | None


def compile_window(
    sizes: tuple[int, ...], rank: int, n: int, itemsize: int, segment_bytes: int | None
) -> WindowPlan:
    """Compile all_reduce/window of `n` elements for `rank`, on nodes with `sizes` ranks."""
    made = schedules.make("all_reduce", "window", sum(sizes), nodes=sizes)
    parts = choice.segments(-(-n // made.blocks) * itemsize, segment_bytes, False)
    read = {op.chunk for ops in made.rounds(rank) for op in ops if type(op) is Read}
    own = [chunk for chunk in range(made.chunks) if chunk not in read]
    assert own == list(range(own[0], own[-1] + 1))
    cut = blocks(n, made.blocks)
    starts = offsets(cut)
    first, stop = starts[own[0]], starts[own[-1]] + cut[own[-1]]
    if len(sizes) == 1:
        return WindowPlan(slice(first, stop), None)
    places = {block: starts[block] - first if block in own else 0 for block in range(made.blocks)}
    messages = _only_messages(segment(made, parts) if parts > 1 else made)
    plan = compile_plan(messages, rank, Layout(cut, places, places))
    plan.copies.clear()  # what is not sent is not touched
    return WindowPlan(slice(first, stop), plan)


def _only_messages(schedule: CommSchedule) -> CommSchedule:
    """Return what is left of a schedule without its reads."""

    def rounds(rank: int) -> Iterator[Round]:
        for ops in schedule.rounds(rank):
            yield tuple(op for op in ops if type(op) in (Send, Recv, RecvReduce))

    return schedule.with_rounds(rounds)
