"""Run all ranks of a schedule in one process on NumPy arrays: the oracle of the tests.

    replay(make("all_reduce", "ring", 3), [[1., 2.], [3., 4.], [5., 6.]])
    -> [array([9., 12.]), array([9., 12.]), array([9., 12.])]

The rules are those of an execution over MPI: operands that meet in a round are added in rank order,
one after the other, and 16-bit values are added in float32 and rounded once a round.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from mpipar.arrays import is_sixteen_bit
from mpipar.errors import BufferMismatchError, explain
from mpipar.partition import blocks
from mpipar.schedule.core import CommSchedule
from mpipar.schedule.rendezvous import Operands, Place, State, execute

Operation = Callable[[Any, Any], Any]


def replay(
    schedule: CommSchedule,
    inputs: Sequence[Any],
    op: Operation = np.add,
    sizes: Sequence[int] | None = None,
) -> list[Any]:
    """Return what every rank ends with, given what every rank starts with.

    `inputs[rank]` is an array, of whose elements in row-major order the rank's first blocks are
    made: cut as `sizes[block]` says, or else in equal cuts as by `partition.blocks`.  Or it is a
    list with one value for each block, in ascending order: arrays of any shape, or any objects that
    `op` takes.  None stands for a rank that starts with nothing.  `op` is a ufunc or any function
    of two values; it must not change them.

    The outputs are flat arrays (lists of blocks, if an input is one), and None on ranks that end
    with nothing.

    Raises BufferMismatchError for inputs that do not fit, ScheduleError for a wrong schedule.
    """
    if len(inputs) != schedule.ranks:
        rule = f"the schedule has {schedule.ranks} ranks"
        raise BufferMismatchError(explain("len(inputs)", len(inputs), rule, "Pass one a rank"))
    start = [_start(schedule, rank, inputs[rank], sizes) for rank in range(schedule.ranks)]
    as_list = any(isinstance(x, list) and _is_blocks(x) for x in inputs)

    def combine(place: Place, chunk: int, operands: Operands) -> Any:
        return fold(op, [value for _, value in operands])

    ends = execute(schedule, start, combine)
    return [_result(schedule, place, as_list) for place in ends]


def fold(op: Operation, values: list[Any]) -> Any:
    """Return `op` applied from left to right; 16-bit arrays in float32, rounded once at the end.

    Raises BufferMismatchError if arrays differ in shape.
    """
    first = values[0]
    if not isinstance(first, np.ndarray) or len(values) == 1:
        return reduce(op, values)
    shapes = [np.shape(value) for value in values]
    if any(shape != shapes[0] for shape in shapes):
        rule = "values that are added have the same shape on every rank"
        raise BufferMismatchError(explain("shapes", shapes, rule, "Pass equal shapes"))
    if is_sixteen_bit(first.dtype):
        return reduce(op, [value.astype(np.float32) for value in values]).astype(first.dtype)
    return reduce(op, values)


def _is_blocks(x: list[Any]) -> bool:
    """Say whether a list holds one value for each block, and is not just a vector of numbers."""
    return not all(isinstance(value, int | float | complex) for value in x)


def _start(schedule: CommSchedule, rank: int, x: Any, sizes: Sequence[int] | None) -> State:
    """Return the values that a rank starts with, by chunk."""
    chunks = schedule.initial(rank)
    held = chunks[:: schedule.parts]  # the first chunk of each block
    if not held:
        return {}
    if isinstance(x, list) and _is_blocks(x):
        values = x
    elif x is None:
        values = []
    else:
        flat = np.ravel(np.asarray(x))
        wanted = (
            blocks(flat.size, len(held))
            if sizes is None
            else [sizes[chunk // schedule.parts] for chunk in held]
        )
        if sum(wanted) != flat.size:
            rule = f"rank {rank} starts with blocks of {list(wanted)} elements"
            raise BufferMismatchError(explain("size", flat.size, rule, "Pass that many elements"))
        bounds = np.cumsum([0, *wanted])
        values = [flat[low:high] for low, high in pairwise(bounds)]
    if len(values) != len(held):
        rule = f"rank {rank} starts with {len(held)} blocks"
        raise BufferMismatchError(explain("blocks", len(values), rule, "Pass that many"))
    if schedule.parts > 1:
        values = [part for value in values for part in np.array_split(value, schedule.parts)]
    return dict(zip(chunks, values, strict=True))


def _result(schedule: CommSchedule, place: Place, as_list: bool) -> Any:
    """Return the blocks that a rank ends with: in one array, or in a list."""
    values = [place.values[chunk] for chunk in schedule.final(place.rank)]
    if not values:
        return None
    if not as_list:
        return np.concatenate(values)
    if schedule.parts > 1:
        groups = range(0, len(values), schedule.parts)
        return [np.concatenate(values[i : i + schedule.parts]) for i in groups]
    return [value.copy() if isinstance(value, np.ndarray) else value for value in values]
