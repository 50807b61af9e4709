"""Ring attention: the keys and values of all ranks pass by the queries of each.

Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023; the zigzag order as in Llama
3, section 3.3.2.  Every rank keeps its queries; blocks of keys and values travel from rank to rank
by `shift`, p - 1 times.  The block in step s on 4 ranks:

    step     0    1    2    3
    rank 0   kv0  kv3  kv2  kv1     while a step is computed the next block is received, so there
    rank 1   kv1  kv0  kv3  kv2     are never more than two blocks on a rank; what the causal mask
    rank 2   kv2  kv1  kv0  kv3     hides completely is not computed
    rank 3   kv3  kv2  kv1  kv0

The outputs over single blocks are merged by their log-sum-exps (kernels/merge.py), in float32 or,
for float64 inputs, in float64.

Backward is a ring of its own: keys and values make the same way again, and the sum of a block's
gradients follows it one step behind, from the rank after its owner round to its owner, which adds
its own term last (the chunk's way in schedule/ring.py's reduce_scatter).

Cost for blocks of n bytes of keys and values: forward p - 1 messages of n, backward p - 1 of n and
p - 1 of the gradients, as long (twice that for 16-bit values, whose sums are float32).  Query heads
may share kv heads, which travel as they are.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.autograd import Function
from mpipar.comm import collectives
from mpipar.comm.waiting import progress
from mpipar.kernels import attention as kernel
from mpipar.kernels.merge import merge
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.context.layout import Ranges, Task, length_of, tasks

SEQUENCE = 2  # the dimension of a block (keys and values, B, S, G, D) along which ranks differ


class Ring(NamedTuple):
    """The ring: its ranks, the positions that each of them holds, the mask."""

    comm: Communicator
    held: tuple[Ranges, ...]
    causal: bool
    scale: float

    def tasks(self, source: int) -> list[Task]:
        """Return what this rank computes with the block of rank `source`."""
        return tasks(self.held[self.comm.rank], self.held[source], self.causal)

    def mask(self, task: Task) -> kernel.Mask:
        """Return the mask of a task, as the kernel takes it."""
        return kernel.Mask(task.ahead is not None, self.scale, task.ahead or 0)

    def source(self, step: int, rank: int | None = None) -> int:
        """Return whose block a rank (this one) has in a step."""
        return ((self.comm.rank if rank is None else rank) - step) % self.comm.size

    def lengths(self, step: int) -> tuple[int, ...]:
        """Return how long the block is that each rank has in a step."""
        size = self.comm.size
        return tuple(length_of(self.held[self.source(step, rank)]) for rank in range(size))

    def shift(self, step: int, block: Array, out: Array | None = None) -> Any:
        """Send the block of this step (or as long a one) on; return the handle of the next one."""
        group, sizes = self.comm.process_group, self.lengths(step)
        return collectives.shift(group, block, 1, out, None, True, SEQUENCE, sizes)


class RingAttention(Function):
    """Attention of this rank's queries over the keys of all ranks of a ring."""

    collective = True

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ring: Ring) -> Array:
        """Merge the outputs over one block after the other; keep q, k, v, output and L."""
        wide = q.astype(compute_dtype(q.dtype), copy=False)  # (B, S, H, D)
        batch, seq, heads, _ = q.shape
        xp = module_of(q)
        out = xp.zeros(q.shape, wide.dtype)
        lse = xp.full((batch, heads, seq), -np.inf)
        for source, block in _travel(ring, k, v):
            for task in ring.tasks(source):
                rows, keys, values = task.rows, block[0, :, : task.seen], block[1, :, : task.seen]
                part = kernel.forward(wide[:, rows], keys, values, ring.mask(task), progress)
                if source == ring.comm.rank:  # the first block: nothing to merge with
                    out[:, rows], lse[..., rows] = part
                else:
                    merge(out[:, rows], lse[..., rows], *part)
        ctx.ring = ring
        out = out.astype(q.dtype, copy=False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Any, ...]:
        """Let keys, values and the sums of their gradients travel; add up those of the queries."""
        ring: Ring = ctx.ring
        q, k, v, out, lse = ctx.saved
        wide = compute_dtype(q.dtype)
        do, wide_q = (x.astype(wide, copy=False) for x in (grad, q))
        delta = kernel.row_delta(do, out)
        xp = module_of(q)
        dq = xp.zeros(q.shape, wide)
        sums = _Sums(ring)
        for step, (source, block) in enumerate(_travel(ring, k, v)):
            block = block.astype(wide, copy=False)
            part = xp.zeros(block.shape, wide)
            for task in ring.tasks(source):
                rows, seen = task.rows, slice(0, task.seen)
                new_q, new_k, new_v = kernel.backward(
                    do[:, rows], wide_q[:, rows], block[0, :, seen], block[1, :, seen],
                    lse[..., rows], delta[..., rows], ring.mask(task), progress,
                )  # fmt: skip
                dq[:, rows] += new_q
                part[0, :, seen] += new_k
                part[1, :, seen] += new_v
            sums.add(step, part)
        dk, dv = sums.own()
        return dq, dk, dv, None


class _Sums:
    """The sums of the blocks' gradients on their way round the ring."""

    def __init__(self, ring: Ring) -> None:
        """Start with nothing on the way."""
        self._ring = ring
        self._mine: Array | None = None
        self._arriving: Any = None

    def add(self, step: int, part: Array) -> None:
        """Add this rank's term to the sum of the block that it has in this step; send it on."""
        if step == 0:
            self._mine = part  # the last term of its sum
            return
        if self._arriving is not None:
            part += self._arriving.wait()
        self._arriving = self._ring.shift(step, part)

    def own(self) -> Array:
        """Return the complete sum of this rank's own block: of keys and values (2, B, S, G, D)."""
        assert self._mine is not None, "a ring has at least one step"
        if self._arriving is not None:
            self._mine += self._arriving.wait()
        return self._mine


def _travel(ring: Ring, k: Array, v: Array) -> Iterator[tuple[int, Array]]:
    """Yield (source, block) of every rank, own first; the next one arrives meanwhile.

    A block is keys and values (2, B, S, G, D).  Two are held, in memory used in turn.
    """
    batch, _, groups, width = k.shape
    longest = max(ring.lengths(0))
    n = 2 * batch * longest * groups * width
    spaces = module_of(k).empty((min(ring.comm.size, 2), n), k.dtype)

    def place(step: int) -> Array:
        shape = (2, batch, ring.lengths(step)[ring.comm.rank], groups, width)
        return spaces[step % 2, : math.prod(shape)].reshape(shape)

    block = place(0)
    block[0], block[1] = k, v
    for step in range(ring.comm.size):
        last = step == ring.comm.size - 1
        arriving = None if last else ring.shift(step, block, place(step + 1))
        yield ring.source(step), block
        if arriving is not None:
            block = arriving.wait()
