"""What an asynchronous call returns: a collective or message in flight."""

from typing import TYPE_CHECKING, Any

from mpipar.comm import clock, waiting
from mpipar.comm.run import Execution, Requests
from mpipar.trace.record import Label

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup


class Handle:
    """`test()` advances it, `wait()` returns its result."""

    __slots__ = ("_group", "_inner", "_label", "_sequence")

    def __init__(
        self,
        inner: Execution | Requests,
        group: "ProcessGroup",
        label: Label,
        sequence: int = 0,
    ) -> None:
        """Take what is in flight, and what a trace calls it; sequence: that of a collective."""
        self._inner, self._group, self._label, self._sequence = inner, group, label, sequence
        if not inner.done:
            waiting.enter(inner.test)

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        return self._inner.test()

    def wait(self) -> Any:
        """Wait for the result and return it; a second call returns it again."""
        begun = clock.begin()
        try:
            result = self._inner.wait()
        except BaseException as error:
            self._group.fails(error)
            raise
        self._group.spent(begun, self._label, self._sequence)
        return result
