"""The short way of small all_reduce calls.

A call of a few bytes costs as much as the Python around it.  Once a small all_reduce has been
prepared, the next one like it goes straight to its persistent requests:

    look it up by (op, algorithm, dtype, size)  ->  copy in  ->  Start, Test, add  ->  copy out
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm import clock
from mpipar.comm.flight import Record
from mpipar.comm.persistent import Persistent
from mpipar.trace import record as trace

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup
    from mpipar.comm.prepare import Prepared

Key = tuple[Any, str | None, np.dtype, int]


class SmallReduce:
    """One prepared all_reduce of a process group."""

    __slots__ = ("_group", "_input", "_label", "_last", "_output", "_run", "_what")

    def __init__(self, group: "ProcessGroup", prepared: "Prepared", run: Persistent) -> None:
        self._group, self._label, self._what = group, prepared.label, prepared.label.details
        self._input, self._output = run.input, run.output
        self._last = run.last  # writes the result straight to where the caller wants it
        self._run = run.run if run.last is None else run.run_to_last

    def of(self, persistent: Persistent) -> bool:
        """Say whether this is the short way to `persistent`."""
        return self._input is persistent.input

    def __call__(self, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Reduce a contiguous x; `out`, if given, has its shape and dtype and is contiguous."""
        begun = clock.begin()
        group = self._group
        group.sequence = number = group.sequence + 1
        group.calls["all_reduce"] += 1
        group.flight.records.append(Record(number, self._what))
        self._input[:] = x if x.ndim == 1 else x.reshape(-1)
        try:
            self._run()
        except BaseException as error:
            group.fails(error)
            raise
        last = self._last
        if out is None:
            result = self._output.copy() if last is None else last()
            if x.ndim != 1:
                result = result.reshape(x.shape)
        else:
            result = out
            flat = out if out.ndim == 1 else out.reshape(-1)
            if last is None:
                flat[:] = self._output
            else:
                last(out=flat)
        seconds = clock.end(begun)
        group.seconds += seconds
        if trace.to is not None:
            trace.to.call(group.flight, self._label, number, begun[0], seconds)
        return result


def find(
    table: dict[Key, SmallReduce], x: Any, op: Any, out: Any, algorithm: str | None
) -> SmallReduce | None:
    """Return the prepared call that fits these arguments as they are, or None."""
    if type(x) is not np.ndarray or not x.flags.c_contiguous or type(op) is not str:
        return None
    if algorithm is not None and type(algorithm) is not str:
        return None
    if out is not None and (
        type(out) is not np.ndarray
        or out.shape != x.shape
        or out.dtype != x.dtype
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        return None
    return table.get((op, algorithm, x.dtype, x.size))
