"""All_reduce of buffers in memory that the ranks of a node share; the result lies once in a node.

    rank 0's buffer  [a0 a1 a2 a3]      rank 2 reads the third block of all four, adds them in rank
    rank 1's buffer  [b0 b1 b2 b3]      order and writes the sum once, in place of a2:
    rank 2's buffer  [c0 c1 c2 c3]
    rank 3's buffer  [d0 d1 d2 d3]      result  [.. .. a2+b2+c2+d2 ..]      read-only, for all four

The schedule is all_reduce/window (mpipar/schedule/window.py): across several nodes, the ranks that
own the same block exchange their sums by messages.  No byte is copied that need not be, and every
sum is taken in rank order (of the node; then in the order of nodes).

    with comm.window(1000, "float32") as window:
        window.buffer[:] = gradient                 # in two slots by turns: a fast rank may fill
        total = window.all_reduce("mean")           # the next one while slower ones still add

The steps of a reduction are in window_reduction.py.  Where memory cannot be shared, the same is
done by messages, and rank 0 says so once.

Cost for n bytes, L ranks on a node: L n bytes read and n written, by all L ranks together.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.comm import collectives, waiting
from mpipar.comm.calls import Call, check_op, label_of
from mpipar.comm.check import checking
from mpipar.comm.flags import RELEASED
from mpipar.comm.flight import Record, describe_groups
from mpipar.comm.window_memory import Memory, in_turn, lay_out, read_only, refusal, say_once
from mpipar.comm.window_plan import compile_window
from mpipar.comm.window_reduction import Reduction, Work
from mpipar.errors import ConfigError, DestroyedError, MismatchError, explain
from mpipar.kernels.reduce import COMBINE

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup

MOST_SLOTS = 2


class Window:
    """A vector of n elements for each rank, in shared memory, and its reductions.

    buffer [n]: what this rank contributes to the next reduction.
    result [n]: the last finished reduction, read-only, one array for all ranks of the node.  It
    stays as it is until this rank starts the reduction `slots` further on.

    Buffers take turns, and one becomes the result: read `buffer` anew for each reduction, and do
    not write into an old one.  `slots` reductions may be in flight.  `shared` says that the memory
    is shared.
    """

    def __init__(
        self, group: "ProcessGroup", n: int, dtype: Any = "float32", slots: int = 2
    ) -> None:
        """Collective over the group.

        Raises ConfigError if an argument cannot work or /dev/shm is too small, MismatchError if
        the ranks ask for different windows; on all ranks together.
        """
        self.n, self.dtype, self.slots = _agree(group, n, dtype, slots)
        self._group = group
        self._number = 0  # reductions started
        self._handles: list[Reduction | _ByMessages | None] = [None] * self.slots
        self._memory, reason = self._share()
        self.shared = self._memory is not None
        self._destroyed = False
        if self._memory is not None:
            team = self._memory.team
            self._vectors = self._memory.typed(0, self.n, self.dtype)
            self._buffers, results = self._vectors[team.nodes.local_rank], self._vectors[0]
            wide, cut = compute_dtype(self.dtype).itemsize, group.segment_bytes
            self._plan = compile_window(team.sizes, team.rank, self.n, wide, cut)
        else:
            say_once(group, "windows", reason)
            self._buffers = [np.zeros(self.n, self.dtype) for _ in range(self.slots)]
            results = self._private = [np.zeros(self.n, self.dtype) for _ in range(self.slots)]
        self._results = [read_only(result) for result in results]
        group.windows.alive.append(self)

    def _share(self) -> tuple[Memory | None, str]:
        """Return shared memory, or None and why there is none; equal on all ranks."""
        group, nbytes = self._group, self.n * self.dtype.itemsize
        if reason := refusal(group):
            return None, reason
        what = f"{self.n:,} elements of {self.dtype.name} in {self.slots} slots for each rank"
        memory = lay_out(group, group.windows.team, nbytes, self.slots, what, tags=2)
        return memory, "the MPI library cannot share memory here"

    # -- use -------------------------------------------------------------------------------------

    @property
    def buffer(self) -> np.ndarray:
        """The array to fill for the next reduction.  Raises ConfigError while it is being read."""
        return in_turn(self._buffers, self._free_number())

    @property
    def result(self) -> np.ndarray:
        """The result of the last finished reduction, read-only; zeros before the first."""
        self._alive()
        return in_turn(self._results, self._finished)

    def all_reduce(self, op: str = "sum") -> np.ndarray:
        """Reduce all ranks' buffers; return the result.  Collective; see `start`."""
        return self.start(op).wait()

    def start(self, op: str = "sum") -> "Reduction | _ByMessages":
        """Start reducing all ranks' buffers; return a handle with `test()` and `wait()`.

        Collective.  op: "sum", "mean", "max", "min" or "prod".
        Raises ConfigError for another, or while the handle `slots` reductions back is unfinished;
        DtypeMismatchError for the mean of integers.
        """
        number, group = self._free_number(), self._group
        call = Call("all_reduce", "window", op, self.dtype, (self.n,))
        with checking(group, "window.all_reduce") as agreed:
            if not isinstance(op, str):
                raise ConfigError(explain("op", op, "not a name", f"One of: {', '.join(COMBINE)}"))
            check_op(call)
            if agreed.wanted:
                agreed.on(self.dtype, f"{self.n} elements, op={op}")
        self._number = number
        before, slot = self._handles[(number - 1) % self.slots], number % self.slots
        result = in_turn(self._results, number)
        if self._memory is None:
            buffer, out = in_turn(self._buffers, number), in_turn(self._private, number)
            by_messages = _ByMessages(group, buffer, out, op, result)
            self._handles[slot] = by_messages
            return by_messages
        group.sequence += 1
        group.calls["all_reduce"] += 1
        assert not isinstance(before, _ByMessages)
        work = self._work(self._memory, number, group.size if op == "mean" else 1)
        label = label_of(call, "window")
        finish, flags = lambda: result, self._memory.flags
        handle = Reduction(group, flags, call, label, number, work, before, finish)
        self._handles[slot] = handle
        group.flight.note(Record(group.sequence, label.details, handle))
        handle.begin(released=number - self.slots)
        if not handle.test():
            waiting.enter(handle.test)
        return handle

    def destroy(self) -> None:
        """Give the memory back; collective; calling it twice is harmless.

        Every array of this window is gone: using one afterwards crashes the process.
        """
        if self._destroyed:
            return
        self._destroyed = True
        self._group.windows.alive.remove(self)
        for handle in self._handles:
            if isinstance(handle, Reduction):
                handle.abandon()
        self._buffers, self._results, self._handles = [], [], []
        self._vectors = []
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.segment.free()

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:  # after an error the other ranks may never come to free it
            self.destroy()

    # -- inside ----------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._destroyed:
            raise DestroyedError("this window was destroyed; make a new one with comm.window")

    @property
    def _finished(self) -> int:
        """The number of the last finished reduction."""
        number = self._number
        while number > max(0, self._number - self.slots) and not self._handle(number).done:
            number -= 1
        return number

    def _handle(self, number: int) -> "Reduction | _ByMessages":
        handle = self._handles[number % self.slots]
        assert handle is not None
        return handle

    def _free_number(self) -> int:
        """Return the number of the next reduction, whose buffer nobody reads any more."""
        self._alive()
        before = self._number + 1 - self.slots
        if before > 0 and not self._handle(before).done:
            rule = f"reduction {before} of this window still reads it"
            raise ConfigError(explain("buffer", before % self.slots, rule, "Wait for it first"))
        number = self._number + 1
        assert self._memory is None or self._memory.flags.reached(RELEASED, number - 2 * self.slots)
        return number

    def _work(self, memory: Memory, number: int, divisor: int) -> Work:
        """Return what this rank adds up in reduction `number`."""
        operands = [in_turn(of_rank, number)[self._plan.own] for of_rank in self._vectors]
        tag = memory.tag + number % 2
        return Work(operands, operands[0], divisor, self._plan.messages, memory.team.across, tag)


class _ByMessages:
    """The same reduction on private memory: added in rank order, as on one node."""

    def __init__(
        self,
        group: "ProcessGroup",
        buffer: np.ndarray,
        out: np.ndarray,
        op: str,
        result: np.ndarray,
    ) -> None:
        self._result = result
        self._handle = collectives.all_reduce(group, buffer, op, out, "direct", True)

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self.test()

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        return bool(self._handle.test())

    def wait(self) -> np.ndarray:
        """Wait for the result and return it."""
        self._handle.wait()
        return self._result


def _agree(group: "ProcessGroup", n: int, dtype: Any, slots: int) -> tuple[int, np.dtype, int]:
    """Return the arguments, checked, and equal on all ranks."""
    problem, wanted, kind = "", "", np.dtype("float32")
    try:
        kind = np.dtype(dtype)
        wanted = f"{n} elements of {kind.name} in {slots} slots"
    except TypeError:
        problem = explain("dtype", dtype, "NumPy does not know it", 'Pass "float32"')
    if not isinstance(n, int | np.integer) or n < 0:
        problem = explain("n", n, "a number of elements is not negative", "Pass n >= 0")
    elif kind.hasobject:
        problem = explain("dtype", dtype, "objects cannot be shared", 'Pass "float32"')
    elif not isinstance(slots, int) or not 1 <= slots <= MOST_SLOTS:
        problem = explain("slots", slots, f"it is 1 to {MOST_SLOTS}", "Pass 2")
    told: list[tuple[str, str]] = group.raw.allgather((problem, wanted))
    for text, _ in told:
        if text:
            raise ConfigError(text)
    if len({words for _, words in told}) > 1:
        raise MismatchError(
            f"the ranks of communicator {group.name!r} ask for different windows: "
            + describe_groups({rank: words for rank, (_, words) in enumerate(told)})
        )
    return int(n), kind, slots
