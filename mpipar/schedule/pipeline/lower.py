"""The lowering pass: from actions to actions and messages, for an executor to post.

    computation                     lowered
    rank 0: 0F0 0B0                 rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
    rank 1: 1F0 1B0                 rank 1: 1RECV_F0 1F0 1B0 1SEND_B0

A send stands right behind the action whose result it carries.  A receive is posted early: the pass
walks all actions in an order in which each follows what it needs, and where an action makes a
message, the receive is appended to its rank's list first, then the action and the send to theirs.

No deadlock, by construction: let the ranks run in just that order.  When a send starts, its
receive has been posted, since it was appended before and the receiver has by then done all it has.
So every send completes at once, even where the library makes each wait for its receive.  And as no
action chooses among several, a schedule that can end in one order does so in every order.

Messages from one rank to another are posted in the same order at both ends, so they match by MPI's
rule that messages do not overtake; distinct tags are not needed.  The walk is by equal slots, so a
receive is posted about when its sender begins to compute: memory for it is not held for longer.
"""

from mpipar.errors import ScheduleError, explain
from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import PipelineSchedule
from mpipar.schedule.pipeline.verify import verify


def lower(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with the sends and receives of activations and gradients added.

    Raises ScheduleError if it is not correct, or lowered already.
    """
    if schedule.lowered:
        rule = "it has messages already"
        raise ScheduleError(explain("schedule", schedule.name, rule, "Lower its computation()"))
    done = verify(schedule)
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    for rank, action in done.in_order():
        ends = schedule.message(action)
        if ends is None:
            rows[rank].append(action)
            continue
        send, receive = ends
        rows[schedule.placement[receive.stage]].append(receive)
        rows[rank] += [action, send]
    return schedule.with_actions(tuple(map(tuple, rows)))
