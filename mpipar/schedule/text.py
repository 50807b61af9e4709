"""A schedule as short text: a line for each rank, the rounds between bars.

    3>1   send chunk 3 to rank 1
    3<1   receive chunk 3 from rank 1, in place of the own value
    3+1   receive chunk 3 from rank 1 and add it to the own value

The ring all_reduce on 2 ranks:

    0: 1>1 0+1 | 0>1 1<1
    1: 0>0 1+0 | 1>0 0<0
"""

from mpipar.schedule.core import CommSchedule, Op, Recv, RecvReduce, Round, Send

_SIGNS = {Send: ">", Recv: "<", RecvReduce: "+"}


def describe(schedule: CommSchedule) -> str:
    """Return the rounds of every rank as text, one line a rank."""
    ranks = range(schedule.ranks)
    return "\n".join(
        f"{rank}: " + " | ".join(map(describe_round, schedule.rounds(rank))) for rank in ranks
    )


def describe_round(ops: Round) -> str:
    """Return the operations of one round as text."""
    return " ".join(map(describe_op, ops)) or "-"


def describe_op(op: Op) -> str:
    """Return one operation as text: `chunk>peer`, `chunk<peer` or `chunk+peer`."""
    return f"{op.chunk}{_SIGNS[type(op)]}{op.peer}"
