"""Linear layers cut over the tensor-parallel group (Shoeybi et al. 2019, section 3).

    y = x W^T + b, weight [out, in] over 4 ranks:

    ColumnParallelLinear   W = [W0; W1; W2; W3] by rows    y_r = x W_r^T + b_r      no message
                           "columns" of W^T                backward: dx = sum of dy_r W_r
    RowParallelLinear      W = [W0  W1  W2  W3] by columns y = sum of x_r W_r^T + b one all_reduce
                                                           backward: dx_r = dy W_r  no message

A column layer followed by a row layer (an MLP, or attention between its projections) therefore
costs one all_reduce of the activations forward and one backward.  Inputs and outputs are replicated
over tp, or a block of the last dimension over tp.

With `sequence`, the input of a column layer and the output of a row layer are blocks of the
sequence instead: the one gathers before its product, the other scatters the sum (see `sequence`).
With `overlap` messages travel while products are computed (see `collective_matmul`).

Initial values depend on seed, name and global index only: p ranks hold the slices of the dense
layer `nn.Linear` of the same seed and name.  With neither, the ranks of a group must have built the
same unnamed layers before, in the same order, as their seeds are then counted.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self, TypedDict, Unpack

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, module_of
from mpipar.arrays import dtype as as_dtype
from mpipar.autograd import Tensor, functional
from mpipar.errors import ConfigError, explain
from mpipar.nn import init
from mpipar.nn.linear import check_full, check_scale, check_size, join
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.replicated import copy_to, gather_from, reduce_from, scatter_to
from mpipar.parallel.tensor.collective_matmul import (
    How,
    copy_linear,
    gather_linear,
    linear_reduce,
    linear_scatter,
)
from mpipar.parallel.tensor.sequence import SequenceShards

AXIS = "tp"  # the mesh axis named in the specs of these layers
Full = tuple[Array, Array | None]  # weight [out, in] and bias [out] of the dense layer


class Settings(TypedDict, total=False):
    """What both layers take by keyword, besides what PyTorch's take.

    sequence: how the sequence is cut between the layers of a model; None: it is replicated there.
    parts: sizes of what is joined in this layer (fused qkv; gate and up), each cut on its own:
    outputs of a column layer, inputs of a row layer.
    seed: None as for nn.Linear.  name: prefix of the parameters' global names.
    std: of normal weights with a zero bias; None: uniform +-1/sqrt(in), as nn.Linear.
    full: the dense weight and bias to take the block from, instead of drawing it.
    """

    sequence: SequenceShards | None
    parts: Sequence[int] | None
    seed: int | None
    name: str
    std: float | None
    dtype: Any
    full: Full | None


class _Cut(Module):
    """A linear layer of whose weight each rank holds a block: what both kinds share."""

    along: ClassVar[int]  # the dimension of the weight [out, in] that is cut
    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool,
        overlap: bool,
        sequence: SequenceShards | None = None,
        parts: Sequence[int] | None = None,
        seed: int | None = None,
        name: str = "",
        std: float | None = None,
        dtype: Any = "float32",
        full: Full | None = None,
    ) -> None:
        """Make this rank's block, without communication."""
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        if std is not None:
            check_scale("std", std)
        self.in_features, self.out_features, self.comm = in_features, out_features, comm
        self.overlap, self.sequence = overlap, sequence
        if sequence is not None and sequence.comm is not comm:
            rule = f"it must cut over the layer's own communicator, {comm.name!r}"
            raise ConfigError(explain("sequence", sequence.comm, rule, "Make it of that one"))
        what, size = (("out_features", out_features), ("in_features", in_features))[self.along]
        self.parts = tuple(parts or (size,))
        for part in self.parts:
            require_divisible(what, part, comm.size, "parts" if parts else "")
        weight = Spec.replicated(join(name, "weight"), (out_features, in_features))
        weight = weight.shard(AXIS, self.along, comm.rank, comm.size, parts)
        offset = Spec.replicated(join(name, "bias"), (out_features,)) if bias else None
        if offset is not None and self.along == 0:
            offset = offset.shard(AXIS, 0, comm.rank, comm.size, parts)
        seed = init.seed_of(seed, name)
        self.weight, self.bias = _parameters(weight, offset, full, seed, std, dtype)

    @classmethod
    def from_full(
        cls, weight: Array, bias: Array | None, comm: Communicator, **settings: Any
    ) -> Self:
        """Return the layer that holds this rank's block of a dense weight [out, in] and bias [out].

        The values are copied, in the weight's dtype; `settings` are those of the constructor.
        """
        check_full("weight", weight, 2)
        if bias is not None:
            check_full("bias", bias, 1)
        out_features, in_features = weight.shape
        settings = {"dtype": weight.dtype, **settings, "full": (weight, bias)}
        return cls(in_features, out_features, comm, bias is not None, **settings)

    def how(self, sizes: Sequence[int] = ()) -> How:
        """Return how the product meets its collective; sizes: of the blocks of the sequence."""
        return How(self.comm, self.weight, self.bias, tuple(sizes), self.overlap)

    def extra_repr(self) -> str:
        """Return the global sizes and the shape of this rank's weight."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, local={self.weight.spec.local_shape}"


class ColumnParallelLinear(_Cut):
    """A linear layer that computes a block of the output features on each rank.

    Input replicated (..., in), or with `sequence` a block (..., s, in); output a block
    (..., out/p), or replicated (..., out) if `gather_output`.  weight [out/p, in] and bias [out/p]
    are sharded over tp along dimension 0.
    """

    along = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        gather_output: bool = False,
        overlap: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        """Make this rank's block; every rank of `comm` makes its own, without communication.

        overlap: with `sequence`, gather in a ring whose steps alternate with products; without,
        sum the gradient of the input beside the products of backward.

        Raises ConfigError if `out_features` or one of its parts does not divide over the ranks.
        """
        super().__init__(in_features, out_features, comm, bias, overlap, **settings)
        self.gather_output = gather_output

    def local_forward(self, x: Any) -> Any:
        """Return this rank's block of the output (..., out/p), without communication."""
        return functional.linear(x, self.weight, self.bias)  # (..., out/p)

    def forward(self, x: Any) -> Any:
        """Return the block (..., out/p) or, if `gather_output`, all of (..., out)."""
        if self.comm.size == 1:
            return self.local_forward(x)
        if self.sequence is not None:
            y = gather_linear(x, self.how(self.sequence.sizes(x)))
        elif self.overlap:
            y = copy_linear(x, self.how())
        else:
            y = self.local_forward(copy_to(self.comm, x))
        if not self.gather_output:
            return y
        return _restore_parts(gather_from(self.comm, y), self.parts, self.comm.size)


class RowParallelLinear(_Cut):
    """A linear layer that takes a block of the input features on each rank and adds the results.

    Input a block (..., in/p) if `input_is_parallel`, else replicated (..., in); output replicated
    (..., out), or with `sequence` a block (..., s, out).  weight [out, in/p] is sharded over tp
    along dimension 1; bias [out] is replicated and added once, after the reduction.
    """

    along = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        input_is_parallel: bool = True,
        overlap: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        """Make this rank's block; every rank of `comm` makes its own, without communication.

        overlap: with `sequence`, sum in a ring whose steps alternate with products; without, sum
        piece by piece beside the product of the next piece.

        Raises ConfigError if `in_features` or one of its parts does not divide over the ranks, or
        for parts of an input that is not parallel.
        """
        if settings.get("parts") and not input_is_parallel:
            rule = "an input with parts must be one that is already cut"
            fix = "Pass input_is_parallel=True"
            raise ConfigError(explain("parts", settings["parts"], rule, fix))
        super().__init__(in_features, out_features, comm, bias, overlap, **settings)
        self.input_is_parallel = input_is_parallel

    def local_forward(self, x: Any) -> Any:
        """Return this rank's term (..., out) of the sum, without bias and without communication."""
        return functional.linear(x, self.weight)  # (..., out), partial

    def forward(self, x: Any) -> Any:
        """Return the whole output (..., out), the same on all ranks, or its block (..., s, out)."""
        if self.comm.size == 1:
            return functional.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter_to(self.comm, x)  # (..., in/p)
        if self.sequence is not None:
            return linear_scatter(x, self.how(self.sequence.state(x.shape[-2])))
        if self.overlap:
            return linear_reduce(x, self.how())
        y = reduce_from(self.comm, self.local_forward(x))
        return y if self.bias is None else y + self.bias


class TensorParallel:
    """Products of replicated matrices, computed in blocks of columns by the ranks of a group."""

    def __init__(self, comm: Communicator) -> None:
        """Use the ranks of `comm`."""
        self.comm = comm

    def matmul(self, a: Any, w: Any) -> Any:
        """Return a w^T (..., out) for a (..., in) and w [out, in], all replicated.

        Each rank multiplies by its partition.blocks of w's rows; one all_gather joins the results,
        so `out` may be anything, also less than the number of ranks.  Arrays or Tensors; backward,
        the gradient of a is one all_reduce and that of w one all_gather.

        Raises ConfigError if the inner sizes differ.
        """
        if w.ndim != 2 or a.shape[-1] != w.shape[1]:
            rule = f"w must be [out, in] for a [batch, in], but a has shape {tuple(a.shape)}"
            raise ConfigError(explain("w.shape", tuple(w.shape), rule, "Pass equal inner sizes"))
        block = scatter_to(self.comm, w, 0)  # (out/p, in)
        a = copy_to(self.comm, a)
        y = functional.linear(a, block)  # (..., out/p)
        if not isinstance(a, Tensor) and not isinstance(block, Tensor):
            y = y.data
        return gather_from(self.comm, y, -1, partition.blocks(w.shape[0], self.comm.size))


def require_divisible(parameter: str, size: int, degree: int, joined: str = "") -> None:
    """Raise ConfigError unless `size` features divide over `degree` ranks.

    The message names the nearest sizes and the nearest degrees that work.
    """
    check_size(parameter, size)
    if size % degree == 0:
        return
    below = size // degree * degree
    sizes = " or ".join(str(s) for s in (below, below + degree) if s > 0)
    fits = [d for d in range(1, max(size, 1) + 1) if size % d == 0]
    smaller = [d for d in fits if d < degree][-1:]
    larger = [d for d in fits if d > degree][:1]
    degrees = " or ".join(map(str, smaller + larger))
    what = f"every one of the {joined}" if joined else "it"
    raise ConfigError(
        explain(
            parameter,
            size,
            f"{what} must divide over the {degree} ranks of the tensor-parallel group",
            f"Nearest sizes: {sizes}; nearest degrees for this size: {degrees}",
        )
    )


def _parameters(
    weight: Spec, bias: Spec | None, full: Full | None, seed: int, std: float | None, dtype: Any
) -> tuple[Parameter, Parameter | None]:
    """Return the local weight and bias: blocks of `full` if given, else drawn as nn.Linear does."""
    bound = weight.shape[1] ** -0.5 if std is None else None

    def make(spec: Spec, whole: Array | None) -> Parameter:
        if whole is not None:
            local = module_of(whole).array(spec.take(whole), dtype=as_dtype(dtype), order="C")
        elif std is not None and spec is bias:
            local = np.zeros(spec.local_shape, as_dtype(dtype))
        else:
            local = init.draw(spec, seed, std=std, bound=bound, dtype=dtype)
        return Parameter(local, spec)

    whole, whole_bias = full or (None, None)
    return make(weight, whole), None if bias is None else make(bias, whole_bias)


def _restore_parts(y: Any, parts: tuple[int, ...], ranks: int) -> Any:
    """Put features gathered rank by rank, each with its blocks of all parts, in global order."""
    if len(parts) == 1:
        return y
    local = sum(parts) // ranks
    starts = accumulate((part // ranks for part in parts), initial=0)
    cuts = [
        y[..., rank * local + start : rank * local + start + part // ranks]
        for part, start in zip(parts, list(starts)[:-1], strict=True)
        for rank in range(ranks)
    ]
    return functional.cat(cuts, -1)
