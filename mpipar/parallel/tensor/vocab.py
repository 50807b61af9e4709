"""An embedding and a cross-entropy cut over the vocabulary (Shoeybi et al. 2019, section 3).

Vocabulary 10 over 4 ranks by partition.blocks: rows 0..2 | 3..5 | 6..7 | 8..9.

    embedding       each rank looks up the ids it holds, zeros for the others; one all_reduce
    logits          copy_to(x) W_r^T: (..., V/p), no message forward, one all_reduce backward
                    (between blocks of the sequence: reduce_scatter there, all_gather here)
    cross-entropy   two all_reduces of a few numbers a token, whatever V is:
                    1. max of the logits (and, with it, how many logits each rank holds)
                    2. sum of exponentials, logit of the target (and sum of logits, if smoothing)

The logits of the whole vocabulary never exist on one rank.  The loss is replicated over the group
and its gradient is local: softmax minus target on the rank's own columns.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array, beside, compute_dtype, is_device, module, module_of
from mpipar.arrays import dtype as as_dtype
from mpipar.autograd import Function, functional
from mpipar.autograd.record import array
from mpipar.autograd.tensor import check_float
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels import cross_entropy_cut as cut
from mpipar.kernels import embedding as rows_of
from mpipar.nn import init
from mpipar.nn.embedding import check_ids
from mpipar.nn.linear import check_full, check_scale, check_size, join
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.replicated import copy_to, reduce_from, reduce_scatter_sequence
from mpipar.parallel.tensor.collective_matmul import How, copy_linear, gather_linear
from mpipar.parallel.tensor.sequence import SequenceShards

AXIS = "tp"
REDUCTIONS = ("mean", "sum", "none")


class VocabParallelEmbedding(Module):
    """An embedding whose rows are spread over the ranks; any vocabulary size.

    weight [blocks(num, p)[r], dim] is sharded over tp along dimension 0.
    """

    def __init__(
        self,
        num: int,
        dim: int,
        comm: Communicator,
        *,
        sequence: SequenceShards | None = None,
        overlap: bool = False,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        dtype: Any = "float32",
        full: Array | None = None,
    ) -> None:
        """Make this rank's rows, those of the dense embedding of the same seed and name.

        sequence, overlap: of `logits`, as for ColumnParallelLinear; with `sequence` the rows that
        `forward` returns are this rank's block too.
        seed: None as for nn.Linear: the ranks must have built the same unnamed layers before.
        full: the dense weight [num, dim] to take the rows from, instead of drawing them.
        """
        check_size("num", num)
        check_size("dim", dim)
        check_scale("std", std)
        self.num, self.dim, self.comm = num, dim, comm
        self.sequence, self.overlap = sequence, overlap
        spec = Spec.replicated(join(name, "weight"), (num, dim)).shard(
            AXIS, 0, comm.rank, comm.size
        )
        self.start = spec.offset[0]
        if full is None:
            seed = init.seed_of(seed, name)
            self.weight = Parameter(init.draw(spec, seed, std=std, dtype=dtype), spec)
        else:
            rows = module_of(full).array(spec.take(full), dtype=as_dtype(dtype), order="C")
            self.weight = Parameter(rows, spec)

    @classmethod
    def from_full(
        cls, weight: Array, comm: Communicator, **settings: Any
    ) -> "VocabParallelEmbedding":
        """Return the embedding that holds copies of this rank's rows of a dense one [num, dim].

        The dtype is the weight's; `settings` are those of the constructor.
        """
        check_full("weight", weight, 2)
        settings = {"dtype": weight.dtype, **settings, "full": weight}
        num, dim = weight.shape
        return cls(num, dim, comm, **settings)

    def forward(self, ids: Array) -> Any:
        """Return the rows (..., dim) of replicated integer ids (...), replicated.

        With `sequence`, of ids (..., S) this rank's block (..., s, dim).
        Raises ConfigError on every rank for an id outside the vocabulary.
        """
        ids = array(ids)
        check_ids("ids", ids, self.num)
        rows = _Lookup.apply(self.weight, ids, self.start)
        if self.sequence is None:
            return reduce_from(self.comm, rows)
        sizes = self.sequence.state(ids.shape[-1])
        return reduce_scatter_sequence(self.comm, rows, -2, sizes)

    def logits(self, x: Any) -> Any:
        """Return this rank's columns (..., V/p) of x W^T, for a replicated x (..., dim).

        With `sequence`, those of the whole sequence for this rank's block x (..., s, dim).
        """
        if self.comm.size == 1:
            return functional.linear(x, self.weight)
        sizes = () if self.sequence is None else self.sequence.sizes(x)
        how = How(self.comm, self.weight, None, sizes, self.overlap)
        if self.sequence is not None:
            return gather_linear(x, how)
        if self.overlap:
            return copy_linear(x, how)
        return functional.linear(copy_to(self.comm, x), self.weight)

    def extra_repr(self) -> str:
        """Return the global sizes and the shape of this rank's rows."""
        return f"num={self.num}, dim={self.dim}, local={self.weight.spec.local_shape}"


class _Lookup(Function):
    """Rows of a block of a table: zeros for ids that lie outside the block."""

    @staticmethod
    def forward(ctx: Any, weight: Array, ids: Array, start: int) -> Array:
        """Copy the rows held here."""
        ctx.ids, ctx.num = beside(ids.astype(np.int64, copy=False) - start, weight), len(weight)
        return rows_of.gather_held(weight, ctx.ids)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array, None, None]:
        """Add the gradients of equal ids."""
        return rows_of.scatter_add_held(grad, ctx.ids, ctx.num), None, None


def vocab_parallel_cross_entropy(
    logits: Any,
    targets: Array,
    comm: Communicator,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Any:
    """Return the cross-entropy of logits whose last dimension is spread over the ranks.

    logits (..., V/p), in rank order and of any sizes; targets (...) global ids, replicated.  The
    result is replicated: a scalar, or (...) for reduction "none".  Smoothing, ignored targets and
    "mean" (over the targets that count) as in PyTorch.  16-bit logits are computed in float32.

    Raises, on every rank, ConfigError for a target outside the vocabulary, an unknown reduction or
    a label_smoothing outside 0..1, BufferMismatchError for targets of another shape, and
    DtypeMismatchError for logits that are integers.
    """
    targets = array(targets)
    check_float("vocab_parallel_cross_entropy", array(logits))
    if reduction not in REDUCTIONS:
        rule = f"it must be one of {', '.join(REDUCTIONS)}"
        raise ConfigError(explain("reduction", reduction, rule, "Choose one of them"))
    if not 0.0 <= label_smoothing <= 1.0:
        rule = "it must be a share of the probability"
        raise ConfigError(explain("label_smoothing", label_smoothing, rule, "Pass 0 to 1"))
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        rule = f"it must be that of the logits without the last, {tuple(logits.shape[:-1])}"
        raise BufferMismatchError(
            explain("targets.shape", tuple(targets.shape), rule, "Pass one target a row")
        )
    if comm.size == 1:
        return functional.cross_entropy(logits, targets, reduction, label_smoothing, ignore_index)
    return _CrossEntropy.apply(logits, targets, comm, label_smoothing, ignore_index, reduction)


class _CrossEntropy(Function):
    """loss = (1 - s) (lse - z[target]) + s (lse - mean(z)), with lse = log sum exp z."""

    collective = True

    @staticmethod
    def forward(
        ctx: Any,
        logits: Array,
        targets: Array,
        comm: Communicator,
        smoothing: float,
        ignore_index: int,
        reduction: str,
    ) -> Array:
        """Exchange the maxima, then the sums."""
        xp = module_of(logits)
        goal = targets.reshape(-1).astype(np.int64, copy=False)  # (N,), on the host or not
        z = logits.reshape(len(goal), logits.shape[-1])  # (N, V/p)
        top, sizes = _maxima(z, comm)
        vocab, start = sum(sizes), sum(sizes[: comm.rank])
        valid = goal != ignore_index
        check_ids("targets", goal, vocab, ignore_index)
        held = valid & (goal >= start) & (goal < start + sizes[comm.rank])
        column = beside(module_of(goal).where(held, goal - start, -1), z)
        count = int(valid.sum()) if reduction == "mean" else 1
        valid = beside(valid, z)
        kept, sums = cut.sums(z, top, column, smoothing)
        sums = comm.all_reduce(sums)
        lse = xp.log(sums[0])
        loss = (1.0 - smoothing) * (lse - sums[1])  # (N,)
        if smoothing:
            loss += smoothing * (lse - sums[2] / vocab)
        loss *= valid
        scale = valid.astype(top.dtype) / max(count, 1)  # of each row's gradient
        ctx.save_for_backward(kept, top, sums[0], scale, column)
        ctx.smoothing, ctx.vocab = smoothing, vocab
        ctx.like = logits.shape, logits.dtype
        if reduction == "none":
            return loss.reshape(targets.shape)
        return loss.sum() / count if count else loss.sum() * np.nan

    @staticmethod
    def backward(ctx: Any, grad: Array) -> tuple[Array | None, ...]:
        """Softmax minus the target distribution, on this rank's columns."""
        kept, top, total, scale, column = ctx.saved
        scale = scale * module_of(kept).asarray(grad).reshape(-1)  # (N,)
        shape, dtype = ctx.like
        dz = cut.slope(kept, top, total, scale, column, ctx.smoothing, ctx.vocab, dtype)
        return dz.reshape(shape), None, None, None, None, None


def _maxima(z: Array, comm: Communicator) -> tuple[Array, tuple[int, ...]]:
    """Return the maximum of each row over all ranks (N,), and how many columns each rank has.

    The numbers of columns ride in the same message: each rank states its own, -inf for the others.
    """
    xp = module_of(z)
    message = xp.full(len(z) + comm.size, -np.inf, compute_dtype(z.dtype))
    message[: len(z)] = cut.maxima(z)
    message[len(z) + comm.rank] = z.shape[1]
    message = comm.all_reduce(message, op="max")
    sizes = message[len(z) :]
    if is_device(sizes):
        sizes = module("cuda").asnumpy(sizes)
    return message[: len(z)], tuple(int(n) for n in sizes)
