"""Memory for gradient buckets that the ranks of a node share: the sums lie there once.

    rank 0   backward writes A │ adds its block of A, B, C, D to R │ reads all of R
    rank 1   backward writes B │ adds its block of A, B, C, D to R │ reads all of R
    rank 2   backward writes C │ ...

Nothing is copied: gradients are written where they are added, and read where the sum is.  Every
bucket is a range of these vectors, whatever buckets there are; a step reduces each of them once, in
one order on all ranks, so that three counters a rank (flags.py) serve all buckets.

Who may still read when others write?  A rank writes its own vector again once ITS reductions of the
step are done, and they are when all ranks have added what they needed of it.  A bucket's range of R
is written again when all ranks have started to reduce that bucket in the next step, for which
they had to have its gradients complete: so a rank may read a sum until then, and add to it in its
own vector.  After buckets were laid out anew, a sum may lie in the range of another bucket: in that
step none is started before all gradients are complete.

Memory for n bytes of gradients and p ranks on a node: (p + 1) n bytes of /dev/shm.  Private buckets
take p n, and each rank twice a bucket while it is added up by messages: sharing costs up to n bytes
a node, and buys time.  In the resident size of a rank, which counts what others own too, there are
its own vector, the sums, and its block of the others': (2 + (p-1)/p) n.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import compute_dtype
from mpipar.comm import clock, waiting
from mpipar.comm.calls import Call, label_of
from mpipar.comm.flags import Flags
from mpipar.comm.flight import TAG, Record
from mpipar.comm.shared_memory import TAGS, lack
from mpipar.comm.window_memory import (
    Memory,
    lay_out,
    read_only,
    refusal,
    say_once,
    whole_lines,
)
from mpipar.comm.window_plan import compile_window
from mpipar.comm.window_reduction import Reduction, Work
from mpipar.errors import ConfigError, explain
from mpipar.trace.record import Label

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup


@dataclass
class Place:
    """A bucket's range: what this rank writes, the sum (read-only), and how it is added up."""

    buffer: np.ndarray
    result: np.ndarray
    work: Work


class SharedBuckets:
    """Vectors of one synchroniser, one a rank, and the reductions that are under way in them."""

    def __init__(self, group: "ProcessGroup", memory: Memory, nbytes: int) -> None:
        self.group, self.nbytes = group, nbytes
        self._memory = memory
        self._used = 0  # bytes that have been given to buckets
        self._number = 0  # reductions started
        self._last: Reduction | None = None
        self._unpublished: deque[Reduction] = deque()
        self._published: deque[Reduction] = deque()
        group.windows.alive.append(self)

    def clear(self) -> None:
        """Forget all places: buckets are about to be laid out anew."""
        self._used = 0

    def place(self, n: int, dtype: np.dtype) -> Place:
        """Return room for `n` elements behind what was given so far."""
        team, start = self._memory.team, self._used
        self._used += whole_lines(n * dtype.itemsize)
        assert self._used <= self.nbytes
        (total, first), *others = self._memory.typed(start, n, dtype)
        vectors = [first, *(vector for (vector,) in others)]
        wide, cut = compute_dtype(dtype).itemsize, self.group.segment_bytes
        plan = compile_window(team.sizes, team.rank, n, wide, cut)
        operands, own = [vector[plan.own] for vector in vectors], total[plan.own]
        work = Work(operands, own, 1, plan.messages, team.across, self._memory.tag)
        return Place(vectors[team.nodes.local_rank], read_only(total), work)

    def reduce(self, place: Place, divisor: float) -> "Pending":
        """Start adding up a bucket, divided by `divisor`; every rank in the same order."""
        group = self.group
        self._number += 1
        group.sequence += 1
        group.calls["all_reduce"] += 1
        dtype, n = place.buffer.dtype, place.buffer.size
        call = Call("all_reduce", "window", "sum", dtype, (n,))
        tag = self._memory.tag + self._number % TAGS
        work = replace(place.work, divisor=divisor, tag=tag)
        label, flags, before = label_of(call, "window"), self._memory.flags, self._last
        finish = lambda: place.result  # noqa: E731
        made = Reduction(group, flags, call, label, self._number, work, before, finish)
        group.flight.note(Record(group.sequence, label.details, made))
        self._last = made
        self._unpublished.append(made)
        made.begin()
        waiting.leave(self.test)
        if not self.test():
            waiting.enter(self.test)
        return Pending(self, made, label)

    def test(self) -> bool:
        """Advance all that is under way, without waiting; say whether it is done."""
        if not self._unpublished and not self._published:
            return True
        # The counters alone would not show that a rank has died: let the library look.
        self.group.raw.Iprobe(MPI.ANY_SOURCE, TAG)
        for reduction in self._unpublished:
            reduction.advance()
            if not reduction.added:
                break
        while self._unpublished and self._unpublished[0].published:
            self._published.append(self._unpublished.popleft())
        while self._published:
            self._published[0].advance()
            if not self._published[0].done:
                return False
            self._published.popleft()
        return not self._unpublished

    def holds(self, array: Any) -> bool:
        """Say whether an array lies in this memory."""
        parts = self._memory.segment.parts
        return any(np.may_share_memory(array, part) for part in parts)

    def destroy(self) -> None:
        """Give the memory back; collective.  Using an array of it afterwards crashes."""
        self.group.windows.alive.remove(self)
        waiting.leave(self.test)
        self._unpublished.clear()
        self._published.clear()
        self._memory.vectors.clear()
        self._memory.segment.free()


class Pending:
    """A bucket that is being added up."""

    __slots__ = ("_label", "_of", "_reduction", "_sequence")

    def __init__(self, of: SharedBuckets, reduction: Reduction, label: Label) -> None:
        self._of, self._reduction = of, reduction
        self._label, self._sequence = label, of.group.sequence

    def test(self) -> bool:
        """Advance without waiting; say whether the sum is there."""
        return self._reduction.done or self._of.test() or self._reduction.done

    def wait(self) -> None:
        """Wait until the sum is there."""
        if not self.test():
            begun = clock.begin()
            waiting.wait(self.test, self._of.group.flight)
            self._of.group.spent(begun, self._label, self._sequence)


def reserve(group: "ProcessGroup", nbytes: int, wanted: bool | None) -> SharedBuckets | None:
    """Return shared memory for buckets of `nbytes` in all, or None; collective.

    wanted: None takes it on one node, where "auto" chooses the algorithm, if there is room; then a
    lack of shared memory is said once.
    Raises ConfigError on all ranks if it is True and there is none.
    """
    if wanted is False or nbytes == 0 or group.size == 1:
        return None
    if wanted is None and (group.nodes.count > 1 or group.algorithm != "auto"):
        return None
    team = group.windows.team
    what = f"gradient buckets of {nbytes / 2**20:,.1f} MiB"
    reason = refusal(group)
    needed = whole_lines(nbytes)
    if team.nodes.local_rank == 0:
        needed += needed + Flags.nbytes(team.nodes.local_size)
    if not reason:
        reason = lack(group, team, needed, what)
    memory = None if reason else lay_out(group, team, nbytes, 1, what, TAGS)
    if memory is not None:
        return SharedBuckets(group, memory, nbytes)
    reason = reason or "the MPI library cannot share memory here"
    if wanted:
        rule = f"gradients cannot be reduced in shared memory: {reason}"
        raise ConfigError(explain("shared", True, rule, "Pass None or False"))
    say_once(group, "gradient buckets", reason)
    return None
