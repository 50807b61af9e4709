"""Products with a block of a weight, together with the collective before or after them.

    gather_linear    y = all_gather(x) W^T + b       column layer, input cut along the sequence
    linear_scatter   y = reduce_scatter(x W^T) + b   row layer, output cut along the sequence
    copy_linear      y = x W^T + b                   column layer, input replicated
    linear_reduce    y = all_reduce(x W^T) + b       row layer, output replicated

The backward of each is the adjoint: that of the first scatters, that of the second gathers, that of
the third sums the gradient of x.  What a gather brought is not kept: backward gathers again, so
that a rank holds 1/p of it in between (Korthikanti et al. 2022, section 4.2.2).

With `overlap` the collective is cut into pieces that travel while the product of another piece is
computed (Wang et al., Overlap Communication with Dependent Computation, ASPLOS 2023).  Rank 0 of 4
in a gather, and in a scatter whose sums go round the ring:

    product    x0 W    x3 W    x2 W    x1 W         z3      z2      z1      z0
    to rank 1  x0 >    x3 >    x2 >                    z3 >    +z2 >   +z1 >     + z0 = y0
    from 3       > x3    > x2    > x1                 > sum 2  > sum 1  > sum 0

Cost: (p-1)/p n bytes in p - 1 messages to the neighbour, as the ring collective; hidden as far as a
product takes as long as a message.  The sums of the scatter are taken in the order of the ring
(block j: rank j+1 first, j last), in float32 for 16-bit numbers, and weight gradients block by
block: without overlap results differ by rounding.  On a reproducible communicator, whose sums are
in rank order, scatters are not cut up.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.autograd import Function, Tensor
from mpipar.autograd.linear import weight_gradient
from mpipar.autograd.tape import state
from mpipar.comm import waiting
from mpipar.kernels import matmul as kernel
from mpipar.kernels.blocks import matrix, widen
from mpipar.kernels.matmul.blas import product
from mpipar.parallel.communicator import Communicator
from mpipar.partition import block, offsets

PIECES = 4  # into which linear_reduce cuts the tokens
EVERYTHING = slice(None)
Gradients = tuple[Array | None, ...]  # of x, weight, bias, and None for `how`


@dataclass(frozen=True)
class How:
    """The parameters of a product, and how it meets its collective.

    Backward reads the data of the weight then, since sharded training may drop the whole weight in
    between.  sizes: of the ranks' blocks of the sequence, if it is cut.
    """

    comm: Communicator
    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...] = ()
    overlap: bool = False

    @property
    def later(self) -> bool:
        """Whether the gradients of the parameters are put off (see `autograd.delay`)."""
        leaves = () if state.delay is None else state.delay.leaves
        return self.weight in leaves and (self.bias is None or self.bias in leaves)


def gather_linear(x: Any, how: How) -> Any:
    """Return (..., S, out/p) from the ranks' blocks x (..., s, in) of a sequence of S."""
    return _GatherLinear.apply(x, how.weight, how.bias, how)


def linear_scatter(x: Any, how: How) -> Any:
    """Return this rank's block (..., s, out) of the sum over ranks, from x (..., S, in/p).

    bias [out] is replicated and added once; so is its gradient: the whole one, on every rank.
    """
    return _LinearScatter.apply(x, how.weight, how.bias, how)


def copy_linear(x: Any, how: How) -> Any:
    """Return (..., out/p) from a replicated x (..., in).

    Backward sums the gradient of x over the ranks while it computes those of the parameters.
    """
    return _CopyLinear.apply(x, how.weight, how.bias, how)


def linear_reduce(x: Any, how: How) -> Any:
    """Return the sum over ranks (..., out), replicated, from x (..., in/p).

    One piece of the rows is summed while the next one is computed.
    """
    return _LinearReduce.apply(x, how.weight, how.bias, how)


class _GatherLinear(Function):
    """The products of the blocks of x as they arrive."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: Array, w: Array, b: Array | None, how: How) -> Array:
        """Keep this rank's block."""
        ctx.how, ctx.x = how, x
        y = _empty((*x.shape[:-2], sum(how.sizes), len(w)), x, w)
        for where, part in _arriving(x, how):
            _affine(part, w, b, y[..., where, :])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Array) -> Gradients:
        """Scatter the gradient of x; gather x again for that of the weight."""
        x, how = ctx.x, ctx.how
        w = how.weight.data
        dx = _scatter(lambda where: _product(dy[..., where, :], w.T), how, x.dtype)
        pairs = ((dy[..., where, :], part) for where, part in _arriving(x, how))
        return dx, *_parameter_gradients(how, pairs, dy), None


class _LinearScatter(Function):
    """The products of the blocks of x, each added to the sum that goes to its rank."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: Array, w: Array, b: Array | None, how: How) -> Array:
        """Keep x, which is whole along the sequence and a block of the features."""
        ctx.how, ctx.x = how, x
        y = _scatter(lambda where: _product(x[..., where, :], w), how, _dtype(x, w))
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, dy: Array) -> Gradients:
        """All three gradients from the blocks of dy as they arrive."""
        x, how = ctx.x, ctx.how
        w = how.weight.data
        dx = module_of(x).empty(x.shape, x.dtype)

        def arrived() -> Iterator[tuple[Array, Array]]:
            for where, part in _arriving(dy, how):
                _affine(part, w.T, None, dx[..., where, :])
                yield part, x[..., where, :]

        pairs = list(arrived()) if how.later else arrived()
        return dx, *_parameter_gradients(how, pairs, dy), None


class _CopyLinear(Function):
    """The gradient of x is summed beside those of weight and bias."""

    collective = True

    @staticmethod
    def forward(ctx: Any, x: Array, w: Array, b: Array | None, how: How) -> Array:
        """Keep x."""
        ctx.how, ctx.x = how, x
        y = _empty((*x.shape[:-1], len(w)), x, w)
        _affine(x, w, b, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Array) -> Gradients:
        """Start the sum, compute the rest, wait for it."""
        x, how = ctx.x, ctx.how
        dx = _product(dy, how.weight.data.T).astype(x.dtype, copy=False)
        coming = how.comm.all_reduce(dx, out=dx, async_op=True)
        gradients = _parameter_gradients(how, [(dy, x)], dy)
        return coming.wait(), *gradients, None


class _LinearReduce(Function):
    """The products of pieces of the rows, each summed over the ranks at once."""

    collective = True  # its forward is, and so is what recomputes it

    @staticmethod
    def forward(ctx: Any, x: Array, w: Array, b: Array | None, how: How) -> Array:
        """Keep x."""
        ctx.how, ctx.x = how, x
        rows = matrix(x)  # (N, in/p)
        y = _empty((len(rows), len(w)), x, w)
        pieces = max(1, min(PIECES, len(rows)))
        coming = []
        for number in range(pieces):
            where = block(len(rows), pieces, number)
            _affine(rows[where], w, None, y[where])
            coming.append(how.comm.all_reduce(y[where], out=y[where], async_op=True))
            waiting.progress()
        for handle in coming:
            handle.wait()
        if b is not None:
            y += b
        return y.reshape(*x.shape[:-1], len(w))

    @staticmethod
    def backward(ctx: Any, dy: Array) -> Gradients:
        """No message: the gradient of a sum is that of each term."""
        x, how = ctx.x, ctx.how
        dx = _product(dy, how.weight.data.T).astype(x.dtype, copy=False)
        return dx, *_parameter_gradients(how, [(dy, x)], dy), None


def _parameter_gradients(
    how: How, pairs: Iterable[tuple[Array, Array]], dy: Array
) -> tuple[Array | None, Array | None]:
    """Return the gradients of weight and bias: sums over pairs (g, x) of g^T x and of g's rows.

    None for one that is in the parameter already, or is put off.
    """

    def compute(_: Array) -> tuple[Array | None, Array | None]:
        leaf = how.weight if how.weight.node is None else None
        dw = db = None
        for g, x in pairs:
            rows = matrix(widen(g))
            if how.weight.requires_grad:
                dw = _sum(dw, weight_gradient(leaf, rows, matrix(widen(x))))
            if how.bias is not None and how.bias.requires_grad:
                db = _sum(db, rows.sum(axis=0))
        return _like(dw, how.weight), _like(db, how.bias)

    if not how.later:
        return compute(dy)
    assert state.delay is not None
    state.delay.add((how.weight, how.bias), compute, dy)
    return None, None


# -- the two movements of a sequence ---------------------------------------------------------------


def _arriving(x: Array, how: How) -> Iterator[tuple[slice, Array]]:
    """Yield (where in the sequence, block) of the ranks' blocks x (..., s, n) until all are here.

    With overlap this rank's own comes first, and the next one is under way while the caller works.
    """
    comm, sizes = how.comm, how.sizes
    if not how.overlap:
        yield EVERYTHING, comm.all_gather(x, dim=-2, sizes=sizes)
        return
    starts, x = offsets(sizes), module_of(x).ascontiguousarray(x)
    for step in range(comm.size):
        mine, next_one = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        last = step == comm.size - 1
        shape = (*x.shape[:-2], sizes[next_one], x.shape[-1])
        coming = None if last else comm.sendrecv(x, shape=shape, async_op=True)
        yield slice(starts[mine], starts[mine] + sizes[mine]), x
        x = x if coming is None else coming.wait()


def _scatter(product: Callable[[slice], Array], how: How, dtype: np.dtype) -> Array:
    """Return this rank's block (..., s, n) of the sum over ranks of product(EVERYTHING).

    With overlap the sum of a block arrives while this rank computes its own term of it.
    """
    comm, sizes = how.comm, how.sizes
    if not how.overlap or comm.process_group.reproducible:
        part = product(EVERYTHING).astype(dtype, copy=False)  # (..., S, n)
        return comm.reduce_scatter(part, dim=-2, sizes=sizes)
    starts = offsets(sizes)
    total, coming = None, None
    for step in range(comm.size):
        this = (comm.rank - step - 1) % comm.size
        if total is not None:
            shape = (*total.shape[:-2], sizes[this], total.shape[-1])
            coming = comm.sendrecv(total, shape=shape, async_op=True)
        term = product(slice(starts[this], starts[this] + sizes[this]))
        total = term if coming is None else term + coming.wait()
    assert total is not None
    return total.astype(dtype, copy=False)


# -- arithmetic: of 16-bit numbers in float32 ------------------------------------------------------


def _product(x: Array, w: Array) -> Array:
    """Return x w^T as a new array (..., out), not rounded."""
    rows = matrix(widen(x))
    if is_device(x):
        y = kernel.matmul(rows, widen(w), transpose_b=True)
    else:
        y = product(rows, widen(w).T)
    return y.reshape(*x.shape[:-1], len(w))


def _affine(x: Array, w: Array, b: Array | None, out: Array) -> None:
    """Write x w^T + b to `out`, straight if it is contiguous."""
    rows = matrix(widen(x))
    straight = out.flags.c_contiguous and out.dtype == rows.dtype == w.dtype
    target = matrix(out) if straight else None
    if is_device(x):
        y = kernel.matmul(rows, widen(w), transpose_b=True, out=target)
    else:
        y = product(rows, widen(w).T, target)
    if b is not None:
        y += b
    if not straight:
        out[...] = y.reshape(out.shape)


def _sum(old: Array | None, new: Array | None) -> Array | None:
    """Return the sum of what there is; `old` may be written to."""
    if old is None or new is None:
        return new if old is None else old
    old += new
    return old


def _like(grad: Array | None, parameter: Any) -> Array | None:
    """Return a gradient in the parameter's dtype."""
    return None if grad is None else grad.astype(parameter.dtype, copy=False)


def _empty(shape: tuple[int, ...], x: Array, w: Array) -> Array:
    """Return an array for a product."""
    return module_of(x).empty(shape, _dtype(x, w))


def _dtype(x: Array, w: Array) -> np.dtype:
    """Return the dtype of a product."""
    return x.dtype if x.dtype == w.dtype else np.promote_types(x.dtype, w.dtype)
