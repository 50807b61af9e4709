"""One all_reduce in shared memory, in flight: its steps, and the memory that they work on.

The sum is taken in place: the first rank's vector becomes the result, which saves fetching memory
that is only written.  So that rank has twice as many vectors, and fills another one next:

    slots = 1     reduction       1   2   3
                  first rank      B   A   B      fills, and there the result lies
                  other ranks     C   C   C

How far each rank is, the others see in three counters (flags.py), for reduction k:

    start      RELEASED = k - slots, READY = k: the buffer is filled; older results are given up
    add        wait for READY >= k of all; add up the own block
    across     messages to the other nodes, if there are any
    finish     REDUCED = k, after k-1; wait for REDUCED >= k of all: the result is there, the buffer
               is free

The first rank fills for reduction k + 2 slots what held result k: it may once k + slots is finished
and RELEASED >= k of all, as every rank says before READY >= k + slots.

Everything is advanced by `test`, from any wait of this process and from the tape's pump.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpipar.arrays import compute_dtype, is_sixteen_bit
from mpipar.comm import waiting
from mpipar.comm.calls import Call
from mpipar.comm.flags import READY, REDUCED, RELEASED, Flags
from mpipar.comm.flight import TAG
from mpipar.comm.prepare import fold_of
from mpipar.comm.run import Execution
from mpipar.comm.shared_memory import Segment, Team, allocate
from mpipar.comm.window_plan import WindowPlan, compile_window
from mpipar.kernels.reduce import COMBINE, fold

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup

PIECE = 1 << 15  # elements that are added, divided and rounded while they are in the cache
TAGS = 8000  # windows alive at once whose messages never mix

# Tests set this to a function of (step, number of the reduction) that is called at each step.
pause: Callable[[str, int], None] | None = None


@dataclass
class Vectors:
    """The vectors of one window: `buffers[i]` are those of the node's rank i, in turn."""

    segment: Segment
    buffers: list[list[np.ndarray]]
    flags: Flags
    plan: WindowPlan
    across: MPI.Intracomm  # the ranks of all nodes, as the plan numbers them
    tag: int

    @property
    def results(self) -> list[np.ndarray]:
        """Where the results lie, in turn."""
        return self.buffers[0]

    def released(self, number: int) -> bool:
        """Say whether no rank of the node reads the result of a reduction any more."""
        return self.flags.reached(RELEASED, number)


def in_turn(vectors: list[np.ndarray], number: int) -> np.ndarray:
    """Return the vector that reduction `number` uses."""
    return vectors[number % len(vectors)]


def lay_out(
    group: "ProcessGroup", team: Team, n: int, dtype: np.dtype, slots: int
) -> Vectors | None:
    """Return vectors of `n` elements in shared memory, all zeros; None if there is no such memory.

    Every rank's part holds its vectors; the first rank's also the counters, at its beginning.
    Collective over the group.  Raises ConfigError on all ranks if the memory is too small.
    """
    lines = -(-n * dtype.itemsize // 64) * 64
    local, rank = team.nodes.local_size, team.nodes.local_rank
    counters = Flags.nbytes(local)
    what = f"{n:,} elements of {dtype.name} in {slots} slots for each rank"
    mine = slots * lines if rank else counters + 2 * slots * lines
    segment = allocate(group, team, mine, what)
    if segment is None:
        return None
    memory = segment.parts

    def vectors(part: int, start: int, count: int) -> list[np.ndarray]:
        starts = [start + i * lines for i in range(count)]
        return [memory[part][at : at + n * dtype.itemsize].view(dtype) for at in starts]

    wide = compute_dtype(dtype).itemsize
    made = Vectors(
        segment,
        [vectors(0, counters, 2 * slots), *(vectors(i, 0, slots) for i in range(1, local))],
        Flags(memory[0], local, rank, segment.sync),
        compile_window(team.sizes, team.rank, n, wide, group.segment_bytes),
        team.across,
        16 + 2 * (team.made % TAGS),
    )
    team.made += 1
    if rank == 0:
        memory[0][:counters] = 0
    for vector in made.buffers[rank]:  # every page is there from now on, near its rank
        vector[:] = 0
    segment.sync()
    team.local.Barrier()
    segment.sync()
    return made


class Reduction:
    """A reduction as a handle: `test()` advances it, `wait()` returns the result."""

    def __init__(
        self,
        group: "ProcessGroup",
        vectors: Vectors,
        call: Call,
        number: int,
        slots: int,
        previous: "Reduction | None",
        finish: Callable[[], np.ndarray],
    ) -> None:
        """Prepare reduction `number`; `finish` returns its result, once that is there.

        `previous` is the reduction before, if it may still be in flight.
        """
        self._group, self._vectors, self._call = group, vectors, call
        self._number, self._slots = number, slots
        self._divisor = group.size if call.op == "mean" else 1
        self._previous, self._finish = previous, finish
        self._step: Callable[[], bool] = self._add
        self._result = in_turn(vectors.results, number)[vectors.plan.own]
        self._total = self._result
        self._execution: Execution | None = None
        self.done = self.published = False

    def begin(self) -> None:
        """Give up the result `slots` ago, and let the others read this rank's buffer."""
        self._at("release")
        self._vectors.flags.set(RELEASED, self._number - self._slots)
        self._at("ready")
        self._vectors.flags.set(READY, self._number)
        if not self.test():
            waiting.enter(self.test)

    def test(self) -> bool:
        """Advance without waiting; say whether the result is there."""
        if not self.done:
            # The counters alone would not show that a rank has died: let the library look.
            self._group.raw.Iprobe(MPI.ANY_SOURCE, TAG)
            while self._step():
                pass
        return self.done

    def wait(self) -> np.ndarray:
        """Wait for the result and return it; a second call returns it again."""
        begin = time.perf_counter()
        if not self.test():
            waiting.wait(self.test, self._group.flight)
        self._group.seconds += time.perf_counter() - begin
        return self._finish()

    def abandon(self) -> None:
        """Do not advance it any more: its memory is given back."""
        waiting.leave(self.test)

    @property
    def place(self) -> str:
        """Where it stands, for the watchdog: the step, and the ranks of the node it waits for."""
        if self.done:
            return "done"
        if self._execution is not None and not self._execution.done:
            return f"across the nodes, {self._execution.place}"
        adding = self._step == self._add
        behind = self._vectors.flags.behind(READY if adding else REDUCED, self._number)
        what = "start it" if adding else "add up their blocks"
        return f"waiting for ranks {behind} of this node to {what}"

    # -- the steps: each says whether the next one may follow at once -----------------------------

    def _at(self, step: str) -> None:
        if pause is not None:
            pause(step, self._number)

    def _add(self) -> bool:
        vectors, number = self._vectors, self._number
        if not vectors.flags.reached(READY, number):
            return False
        self._at("add")
        operands = [in_turn(of_rank, number)[vectors.plan.own] for of_rank in vectors.buffers]
        if vectors.plan.messages is None:
            add(self._call.op, operands, self._total, self._divisor)
            self._step = self._publish
            return True
        if is_sixteen_bit(self._call.dtype):  # the sums of the nodes stay float32
            self._total = np.empty(self._total.size, compute_dtype(self._call.dtype))
        add(self._call.op, operands, self._total)
        self._at("across")
        self._execution = Execution(
            vectors.across,
            vectors.plan.messages,
            self._total,
            self._total,
            vectors.tag + self._number % 2,
            fold_of(self._call._replace(dtype=self._total.dtype)),
            1,
            self._group.pool,
            self._group.flight,
            lambda: None,
        )
        self._step = self._across
        return True

    def _across(self) -> bool:
        assert self._execution is not None
        if not self._execution.test():
            return False
        if self._divisor != 1 or self._total is not self._result:
            add(self._call.op, [self._total], self._result, self._divisor)
        self._step = self._publish
        return True

    def _publish(self) -> bool:
        """Say that the own block is there.  A counter at k speaks for k-1 too: that is first."""
        if self._previous is not None and not self._previous.published:
            self._previous.test()
            if not self._previous.published:
                return False
        self._previous = None
        self._at("reduced")
        self._vectors.flags.set(REDUCED, self._number)
        self.published = True
        self._step = self._end
        return True

    def _end(self) -> bool:
        if self._vectors.flags.reached(REDUCED, self._number):
            self._at("done")
            self.done = True
            waiting.leave(self.test)
        return False


def add(op: str, operands: list[np.ndarray], out: np.ndarray, divisor: int = 1) -> None:
    """Write the reduction of the operands into `out`, piece by piece, so that each stays cached.

    `out` may be the first operand.  16-bit operands are combined in float32, and rounded once where
    `out` has 16 bits too.
    """
    wide = compute_dtype(operands[0].dtype)
    for start in range(0, out.size, PIECE):
        pieces = [operand[start : start + PIECE] for operand in operands]
        target = out[start : start + PIECE]
        if out.dtype == operands[0].dtype:
            fold(COMBINE[op], pieces, target, divisor)
        elif is_sixteen_bit(out.dtype):
            target[:] = pieces[0] / divisor
        else:
            fold(COMBINE[op], [piece.astype(wide) for piece in pieces], target, divisor)
