"""A call of a collective: what all ranks must agree on, and which algorithms it may take."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpipar import schedule as schedules
from mpipar.arrays import is_sixteen_bit
from mpipar.comm import library
from mpipar.errors import ConfigError, DtypeMismatchError, explain
from mpipar.kernels.reduce import COMBINE
from mpipar.partition import blocks
from mpipar.trace.record import Label

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WHOLE_VECTOR = ("all_reduce", "broadcast", "reduce")  # cut by the schedule, not by the caller
_PREDEFINED = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}


class Call(NamedTuple):
    """What all ranks of the group must agree on.

    `sizes` are the elements of each block (of the whole vector for all_reduce, broadcast, reduce).
    """

    collective: str
    algorithm: str
    op: Any  # a name of COMBINE, a UserOp, or None
    dtype: np.dtype
    sizes: tuple[int, ...]
    root: int = 0
    offset: int = 1
    dims: tuple[int, ...] = ()  # the dimensions that are cut or joined
    once: bool = False  # its sizes will hardly come again: its plan is not kept


@dataclass(eq=False, frozen=True)
class UserOp:
    """A user's MPI.Op, for one call: its handle may mean another operation later."""

    op: MPI.Op

    def __str__(self) -> str:
        return "MPI.Op"


def operation(op: Any) -> Any:
    """Return a name for a predefined MPI.Op, so that it runs on our own schedules."""
    if isinstance(op, str):
        return op
    if not isinstance(op, MPI.Op):
        raise ConfigError(explain("op", op, "it must be a name or an MPI.Op", 'Pass "sum"'))
    for name, known in _PREDEFINED.items():
        if op == known:
            return name
    return UserOp(op)


def algorithms(collective: str) -> tuple[str, ...]:
    """Return the names that `algorithm=` takes for a collective, besides "auto".

    Raises ConfigError for an unknown collective.
    """
    own = schedules.algorithms(collective)
    return (*own, "mpi") if collective in library.COLLECTIVES else own


def check_op(call: Call) -> None:
    """Raise ConfigError for an unknown operation, DtypeMismatchError for one not of the dtype."""
    if call.op is None or isinstance(call.op, UserOp):
        return
    if call.op not in COMBINE:
        raise ConfigError(
            explain("op", call.op, "not known", f"One of: {', '.join(COMBINE)}, or an MPI.Op")
        )
    if call.op == "mean" and call.dtype.kind in "biu":
        raise DtypeMismatchError(
            explain("op", "mean", f"{call.dtype} has no fractions", 'Use "sum", or a float')
        )
    if call.dtype.kind == "c" and call.op in ("max", "min"):
        raise DtypeMismatchError(
            explain("op", call.op, "complex numbers have no order", 'Use "sum"')
        )


def allowed(call: Call, default: str, reproducible: bool) -> str:
    """Return the algorithm that the caller and the rules ask for, or "auto" where none does.

    `default` is the group's algorithm; where a collective does not have it, that means "auto".
    Raises ConfigError for an unknown algorithm, or one that the dtype or `reproducible` forbids.
    """
    wanted = call.algorithm
    reduces = call.collective in REDUCTIONS
    ordered = reduces and (
        reproducible or is_sixteen_bit(call.dtype) or isinstance(call.op, UserOp)
    )
    known = algorithms(call.collective)
    if wanted == "auto" or (wanted == default and wanted not in known):
        if ordered:
            return "linear" if call.collective == "reduce" else "direct"
        return "auto"
    if not isinstance(wanted, str) or wanted not in known:
        raise ConfigError(
            explain(
                "algorithm",
                wanted,
                f"{call.collective} does not have it",
                f"Choose one of: auto, {', '.join(known)}",
            )
        )
    if (
        ordered
        and wanted not in ("direct", "linear")
        and not (isinstance(call.op, UserOp) and wanted == "mpi" and not reproducible)
    ):
        why = "reproducible=True" if reproducible else f"{call.dtype.name}, op {call.op}"
        raise ConfigError(
            explain(
                "algorithm",
                wanted,
                f"this reduction ({why}) adds all contributions at once in rank order",
                'Use "auto" or "direct" ("linear" for reduce)',
            )
        )
    return wanted


def block_sizes(call: Call, count: int) -> tuple[int, ...]:
    """Return the elements of each of the schedule's `count` blocks."""
    if call.collective in WHOLE_VECTOR:
        return blocks(call.sizes[0], count)
    return call.sizes


def describe(call: Call, algorithm: str) -> str:
    """Return the call in words: what ranks compare when they do not agree."""
    sizes = call.sizes[0] if len(set(call.sizes)) == 1 else call.sizes
    op = f", op={call.op}" if call.op is not None else ""
    root = f", root={call.root}" if call.collective in ROOTED else ""
    dims = f", dims={call.dims}" if call.dims else ""
    offset = f", offset={call.offset}" if call.collective == "shift" else ""
    details = f"{sizes} elements{dims}{op}{root}{offset}"
    return f"{call.collective}({call.dtype.name}, {details}) by {algorithm}"


def label_of(call: Call, algorithm: str) -> Label:
    """Return what traces call a call: all_reduce/ring, its bytes, and the words of `describe`."""
    nbytes = sum(call.sizes) * call.dtype.itemsize
    return Label(f"{call.collective}/{algorithm}", nbytes, describe(call, algorithm))


def check_rank(size: int, rank: Any, parameter: str) -> None:
    """Raise ConfigError if `rank` is none of the group's."""
    whole = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not whole or not 0 <= rank < size:
        rule = f"it must be a rank of the group, 0..{size - 1}"
        raise ConfigError(explain(parameter, rank, rule, "Pass one of them"))
