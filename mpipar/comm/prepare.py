"""A call made ready to run: its plan, its addition, and what the watchdog calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import is_sixteen_bit
from mpipar.comm.calls import WHOLE_VECTOR, Call, UserOp
from mpipar.comm.persistent import Persistent
from mpipar.comm.plan import Layout, Plan
from mpipar.kernels.reduce import COMBINE, fold
from mpipar.partition import offsets
from mpipar.schedule import CommSchedule
from mpipar.trace.record import Label


@dataclass(slots=True)
class Prepared:
    """A compiled call, kept for the next one like it."""

    algorithm: str
    label: Label
    signature: int
    plan: Plan | None = None
    persistent: Persistent | None = None
    fold: Callable = fold
    divisor: int = 1
    nbytes: int = 0  # of the whole call, if it has buffers of its own


@dataclass(slots=True)
class _Fold:
    """The addition of one reduction, as `run` calls it."""

    combine: np.ufunc | None
    ufunc: np.ufunc

    def __call__(self, operands: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> None:
        fold(self.ufunc, operands, out, divisor)


def layout_of(made: CommSchedule, rank: int, sizes: Sequence[int]) -> Layout:
    """Blocks lie one behind the other, in ascending order, in the input and in the output."""
    parts = made.parts

    def starts(chunks: list[int]) -> dict[int, int]:
        held = [chunk // parts for chunk in chunks[::parts]]
        return dict(zip(held, offsets([sizes[b] for b in held]), strict=True))

    if made.collective in WHOLE_VECTOR:
        everywhere = dict(enumerate(offsets(sizes)))
        return Layout(sizes, everywhere, everywhere)
    return Layout(sizes, starts(made.initial(rank)), starts(made.final(rank)))


def fold_of(call: Call) -> Callable:
    """Return the addition of a call: a ufunc's, or the user's operation."""
    if isinstance(call.op, UserOp):
        return _user_fold(call.op.op)
    ufunc = COMBINE[call.op or "sum"]
    return _Fold(None if is_sixteen_bit(call.dtype) else ufunc, ufunc)


def _user_fold(op: MPI.Op) -> Callable:
    """Return the fold of a user's MPI.Op: ((x_0 op x_1) op x_2) ..."""

    def run(operands: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> None:
        total = operands[0]
        for operand in operands[1:]:
            following = operand.copy()
            op.Reduce_local(total, following)
            total = following
        np.copyto(out, total)

    return run


def dividing(output: np.ndarray, divisor: int, finish: Callable[[], Any]) -> Callable[[], Any]:
    """Return a `finish` that divides the output first: the library's mean."""

    def run() -> Any:
        np.divide(output, divisor, out=output)
        return finish()

    return run
