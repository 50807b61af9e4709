"""Sequence parallelism in the tensor-parallel group (Korthikanti et al. 2022, section 4.2.2).

What lies between the column and row layers of a model (residual stream, norms, dropout) is the same
for every token, so each of p ranks does it for a block of the sequence.  10 positions on 4 ranks:

    rank 0   0 1 2 ─ norm ┐              ┌ heads 0,1 ┐                  ┌ 0 1 2 ─ dropout, add
    rank 1   3 4 5 ─ norm ┼─ all_gather ─┼ heads 2,3 ┼─ reduce_scatter ─┼ 3 4 5 ─ dropout, add
    rank 2   6 7   ─ norm ┤    0 .. 9    ├ heads 4,5 ┤    sum, cut      ├ 6 7   ─ dropout, add
    rank 3   8 9   ─ norm ┘              └ heads 6,7 ┘                  └ 8 9   ─ dropout, add

Forward sends as many bytes as without it, where an all_reduce does both steps, and the activations
between the layers take 1/p of the memory.  Backward runs the adjoints, and gathers the inputs of
column layers once more instead of keeping them: 5 gathers or scatters where forward and backward
had 2 all_reduces, 4 in all.  Blocks are partition.blocks; a rank may have no position.

A replicated parameter that is used on blocks gets a term of its gradient on each rank.  Those of
norms are added where they are used (one all_reduce a norm); the bias of a row layer needs no
message, as its backward gathers the gradient anyway; the table of positions is looked up whole and
then cut, whose adjoint gathers.  So every gradient is complete when it reaches its parameter.
"""

from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, module_of
from mpipar.autograd import Function, Tensor, functional
from mpipar.errors import StateError, explain
from mpipar.nn.norm import LayerNorm, RMSNorm
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.replicated import scatter_to


class SequenceShards:
    """How the layers of a model cut the sequence; those of one model share one.

    A block does not tell how long the whole is, so whoever sees the whole states it: an embedding,
    a row layer, `shard`.  Column layers read it.
    """

    def __init__(self, comm: Communicator) -> None:
        """Cut over the ranks of `comm`."""
        self.comm = comm
        self.length: int | None = None  # of the sequences that pass now

    def state(self, length: int) -> tuple[int, ...]:
        """Say how long the whole sequence is; return the sizes of the ranks' blocks."""
        self.length = int(length)
        return partition.blocks(self.length, self.comm.size)

    def shard(self, x: Any, dim: int = -1) -> Any:
        """Return this rank's block of a replicated x, whose whole sequence lies along `dim`.

        x: an array (positions), or a Tensor, whose gradient is gathered.
        """
        self.state(x.shape[dim])
        return scatter_to(self.comm, x, dim)

    def whole_length(self, x: Any) -> int:
        """Collective: return the length of the sequence of which x (..., s, C) is a rank's block.

        For who is given blocks only, as a later stage of a pipeline is.
        """
        return int(self.comm.all_reduce(np.array([x.shape[-2]]))[0])

    def sizes(self, x: Any) -> tuple[int, ...]:
        """Return the sizes of the ranks' blocks, one of which is x (..., s, C).

        Raises StateError if x is not this rank's block of a sequence of the length stated.
        """
        sizes = () if self.length is None else partition.blocks(self.length, self.comm.size)
        if not sizes or x.ndim < 2 or x.shape[-2] != sizes[self.comm.rank]:
            rule = f"x must be this rank's block of a sequence of {self.length}, (..., block, C)"
            fix = "Cut the input with shard(x, dim=-2) of the layer's SequenceShards"
            raise StateError(explain("x.shape", tuple(x.shape), rule, fix))
        return sizes


class SequenceLayerNorm(LayerNorm):
    """A LayerNorm on blocks of the sequence: weight and bias are replicated."""

    def __init__(self, comm: Communicator, *args: Any, **settings: Any) -> None:
        """Make what LayerNorm(*args, **settings) makes."""
        super().__init__(*args, **settings)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the block x (..., s, dim)."""
        weight, bias = share(self.comm, self.weight, self.bias)
        return functional.layer_norm(x, weight, bias, self.eps)


class SequenceRMSNorm(RMSNorm):
    """An RMSNorm on blocks of the sequence: the weight is replicated."""

    def __init__(self, comm: Communicator, *args: Any, **settings: Any) -> None:
        """Make what RMSNorm(*args, **settings) makes."""
        super().__init__(*args, **settings)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the block x (..., s, dim)."""
        (weight,) = share(self.comm, self.weight)
        return functional.rms_norm(x, weight, self.eps)


def share(comm: Communicator, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return replicated parameters for use on blocks; all their gradients are summed at once."""
    return parameters if comm.size == 1 else _Share.apply(*parameters, comm)


class _Share(Function):
    """copy_to of several Tensors of one dtype, with one message in backward."""

    collective = True

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Array, ...]:
        """Pass the arrays on."""
        *arrays, ctx.comm = arguments
        return tuple(arrays)

    @staticmethod
    def backward(ctx: Any, *grads: Array) -> tuple[Array | None, ...]:
        """Add up all gradients over the ranks, as one array."""
        flat = module_of(grads[0]).concatenate([grad.reshape(-1) for grad in grads])
        flat = ctx.comm.all_reduce(flat, out=flat)
        ends = list(accumulate(prod(grad.shape) for grad in grads))
        pieces = module_of(flat).split(flat, ends[:-1])
        sums = (piece.reshape(g.shape) for piece, g in zip(pieces, grads, strict=True))
        return (*sums, None)
