"""A schedule as short text: a line for each rank, the rounds between bars.

    3>1   send chunk 3 to rank 1
    3<1   receive chunk 3 from rank 1, in place of the own value
    3+1   receive chunk 3 from rank 1 and add it to the own value
    3@1   read chunk 3 of rank 1, in place of the own value
    3&1   read chunk 3 of rank 1 and add it to the own value
    -     a round in which the rank does nothing

The ring all_reduce on 2 ranks:

    0: 1>1 0+1 | 0>1 1<1
    1: 0>0 1+0 | 1>0 0<0
"""

import re
from collections.abc import Callable

from mpipar.errors import ScheduleError, explain
from mpipar.schedule.core import CommSchedule, Op, Read, ReadReduce, Recv, RecvReduce, Round, Send

_SIGNS = {Send: ">", Recv: "<", RecvReduce: "+", Read: "@", ReadReduce: "&"}
_KINDS: dict[str, Callable[[int, int], Op]] = {
    ">": Send,
    "<": Recv,
    "+": RecvReduce,
    "@": Read,
    "&": ReadReduce,
}


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
    """Return one operation as text: `chunk>peer`, `chunk<peer`, `chunk+peer` and so on."""
    return f"{op.chunk}{_SIGNS[type(op)]}{op.peer}"


def parse_rounds(text: str) -> list[Round]:
    """Return the rounds of one rank, from text like `1>1 0+1 | 0>1 1<1`.

    Raises ScheduleError naming the operation that it cannot read.
    """
    rounds = text.split("|") if text.strip() else []
    return [tuple(map(_parse_op, words.replace("-", " ").split())) for words in rounds]


def _parse_op(word: str) -> Op:
    found = re.fullmatch(r"(\d+)([<>+@&])(\d+)", word)
    if not found:
        rule = "an operation is chunk>peer, chunk<peer, chunk+peer, chunk@peer or chunk&peer"
        raise ScheduleError(explain("operation", word, rule, "Write it so"))
    chunk, sign, peer = found.groups()
    return _KINDS[sign](int(peer), int(chunk))
