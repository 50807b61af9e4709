"""Numbers that all ranks of a group must know or have alike before an operation sends its data.

    table = agree(group, "ring_attention", {"heads": 8, "length": 251}, differ=("length",))
    table["length"]        (251, 251, 251, 250)

One small all-gather.  Where a rank has found something wrong, or where the ranks differ, all of
them raise together and nothing else is sent.  In a group of one nothing is sent at all.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np

import mpipar.errors
from mpipar.comm.calls import Call
from mpipar.comm.flight import describe_groups
from mpipar.comm.group import ProcessGroup
from mpipar.errors import MismatchError, MpiparError

Table = dict[str, tuple[int, ...]]


def agree(
    group: ProcessGroup,
    what: str,
    facts: Mapping[str, int],
    differ: Collection[str] = (),
    problem: MpiparError | None = None,
    show: Mapping[str, Callable[[int], object]] | None = None,
) -> Table:
    """Return for each fact its value on every rank.

    facts: whole numbers under the same names on every rank.  differ: those that need not be equal.
    problem: what this rank has found wrong; its facts count for nothing then.
    show: for facts that are numbers of something: what a message says in place of the number.

    Raises, on every rank: the problem of the lowest rank that has one; MismatchError if facts that
    should be equal are not.
    """
    if group.size == 1:
        if problem is not None:
            raise problem
        return {name: (value,) for name, value in facts.items()}
    mine = np.array([problem is not None, *facts.values()], np.int64)
    told = np.empty(group.size * mine.size, np.int64)
    call = Call("all_gather", "auto", None, told.dtype, (mine.size,) * group.size)
    group.start(call, mine, told, lambda: None)
    rows = told.reshape(group.size, mine.size)
    if rows[:, 0].any():
        _raise_problem(group, what, problem)
    table = {name: tuple(rows[:, 1 + i].tolist()) for i, name in enumerate(facts)}
    wrong = [name for name, values in table.items() if name not in differ and len({*values}) > 1]
    if wrong:
        said = {n: [(show or {}).get(n, int)(value) for value in table[n]] for n in wrong}
        texts = [", ".join(f"{n}={said[n][rank]}" for n in wrong) for rank in range(group.size)]
        each = describe_groups(dict(enumerate(texts)))
        raise MismatchError(f"the ranks call {what} with different arguments: {each}")
    return table


def _raise_problem(group: ProcessGroup, what: str, problem: MpiparError | None) -> None:
    """Raise on every rank what the lowest rank with a problem found."""
    mine = ("", "") if problem is None else (type(problem).__name__, str(problem))
    told = group.raw.allgather(mine)
    rank, (kind, text) = next((rank, row) for rank, row in enumerate(told) if row[1])
    if problem is not None and str(problem) == text:
        raise problem
    raise getattr(mpipar.errors, kind, MpiparError)(f"{text} (rank {rank}, in {what})")
