"""Operations that move elements: reshape, permute, slice, index, cat, split, stack.

Their vjps move the gradient back; views stay views in both directions.  An index of slices and
numbers names every element at most once, so its gradient is assigned into zeros; an index of
integer arrays may name one twice, so its gradient is added.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.autograd.elementwise import unbroadcast
from mpipar.autograd.record import array, record, record_many
from mpipar.autograd.reductions import dims_of, is_int, one_dim
from mpipar.autograd.tensor import Tensor
from mpipar.errors import BufferMismatchError, explain


def reshape(x: Any, *shape: Any) -> Tensor:
    """Return x in another shape of the same size; one size may be -1.

    It shares memory with x where x lies in order, else it is a copy.
    """
    data = array(x)
    target = shape if len(shape) != 1 or is_int(shape[0]) else _sizes(shape[0])
    before = data.shape
    try:
        out = data.reshape(target)
    except (TypeError, ValueError) as error:
        raise BufferMismatchError(
            explain("shape", target, f"it must have the {data.size} elements of shape {before}",
                    "Pass sizes with this product")
        ) from error  # fmt: skip
    return record(out, (x,), lambda g: g.reshape(before))


def _sizes(shape: Any) -> tuple[Any, ...]:
    """Return sizes, or dimensions, given as one argument; what they are is checked elsewhere."""
    return tuple(shape) if isinstance(shape, Iterable) else (shape,)


def unsqueeze(x: Any, dim: int) -> Tensor:
    """Return x with a new dimension of size 1 at place `dim` of the result."""
    shape = list(array(x).shape)
    place = one_dim(dim, len(shape) + 1)
    return reshape(x, (*shape[:place], 1, *shape[place:]))


def squeeze(x: Any, dim: Any = None) -> Tensor:
    """Return x without its dimensions of size 1, or without those of `dim` that have size 1."""
    shape = array(x).shape
    gone = [d for d in dims_of(dim, len(shape)) if shape[d] == 1]
    return reshape(x, tuple([n for d, n in enumerate(shape) if d not in gone]))


def permute(x: Any, *dims: Any) -> Tensor:
    """Return x with dimension dims[i] at place i."""
    data = array(x)
    given = dims if len(dims) != 1 or is_int(dims[0]) else _sizes(dims[0])
    order = tuple(d + data.ndim if is_int(d) and d < 0 else d for d in given)
    if not all(map(is_int, order)) or sorted(order) != list(range(data.ndim)):
        raise BufferMismatchError(
            explain("dims", dims, f"they must be the {data.ndim} dimensions of shape {data.shape}",
                    "Name each of them once")
        )  # fmt: skip
    back = tuple(sorted(range(data.ndim), key=order.__getitem__))
    return record(data.transpose(order), (x,), lambda g: g.transpose(back))


def transpose(x: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Return x with two dimensions exchanged."""
    data = array(x)
    order = list(range(data.ndim))
    try:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    except (IndexError, TypeError) as error:
        raise BufferMismatchError(
            explain("dims", (dim0, dim1), f"they must be dimensions of shape {data.shape}",
                    f"Choose from {-data.ndim} to {data.ndim - 1}")
        ) from error  # fmt: skip
    return permute(x, order)


def broadcast_to(x: Any, shape: Sequence[int]) -> Tensor:
    """Return x repeated to `shape`, as NumPy broadcasts."""
    data = array(x)
    before, dtype = data.shape, data.dtype
    target = (shape,) if is_int(shape) else _sizes(shape)
    try:
        out = np.broadcast_to(data, target)
    except (TypeError, ValueError) as error:
        raise BufferMismatchError(
            explain("shape", target, f"a tensor of shape {before} must broadcast to it",
                    "Make dimensions, counted from the last, equal or 1")
        ) from error  # fmt: skip
    return record(out, (x,), lambda g: unbroadcast(g, before, dtype))


def index(x: Any, where: Any) -> Tensor:
    """Return x[where]: numbers, slices, None, Ellipsis, boolean masks, arrays of integers."""
    data = array(x)
    parts = where if isinstance(where, tuple) else (where,)
    parts = tuple([_part(part) for part in parts])
    repeats = any([hasattr(p, "dtype") and p.ndim and p.dtype != bool for p in parts])
    shape, dtype, xp = data.shape, data.dtype, module_of(data)

    def vjp(g: Array) -> Array:
        if not repeats:
            out = xp.zeros(shape, dtype)
            out[parts] = g
            return out
        total = xp.zeros(shape, compute_dtype(dtype))
        xp.add.at(total, parts, g)
        return total.astype(dtype, copy=False)

    return record(data[parts], (x,), vjp)


def _part(part: Any) -> Any:
    """Return one part of an index: a sequence, which a list or tuple is here, as an array."""
    if isinstance(part, Tensor):
        return part.data
    if not isinstance(part, Sequence) or isinstance(part, str):
        return part
    out = np.asarray(part)
    return out if out.size else out.astype(np.intp)  # NumPy lets x[[]] name nothing


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Return the tensors one after the other along `dim`; the other dimensions are equal."""
    datas = [array(x) for x in tensors]
    out = _joined("cat", np.concatenate, datas, dim)
    ends = list(accumulate([data.shape[dim] for data in datas]))
    dtypes = [data.dtype for data in datas]
    before = (slice(None),) * (dim % out.ndim)

    def vjp(g: Array) -> tuple[Array, ...]:
        starts = [0, *ends[:-1]]
        return tuple(
            g[(*before, slice(start, end))].astype(dtype, copy=False)
            for start, end, dtype in zip(starts, ends, dtypes, strict=True)
        )

    return record(out, tuple(tensors), vjp if len(datas) > 1 else lambda g: g)


def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Return equal tensors along a new dimension."""
    datas = [array(x) for x in tensors]
    out = _joined("stack", np.stack, datas, dim)
    dtypes = [data.dtype for data in datas]
    before = (slice(None),) * (dim % out.ndim)

    def vjp(g: Array) -> tuple[Array, ...]:
        return tuple(g[(*before, i)].astype(dtype, copy=False) for i, dtype in enumerate(dtypes))

    return record(out, tuple(tensors), vjp if len(datas) > 1 else lambda g: vjp(g)[0])


def _joined(name: str, join: Any, datas: list[Array], dim: int) -> Array:
    """Return join(datas, dim); raises BufferMismatchError with all shapes if they do not fit."""
    try:
        return join(datas, dim)
    except ValueError as error:
        raise BufferMismatchError(
            explain(f"{name} of shapes", [data.shape for data in datas],
                    f"they must fit along dim {dim}, but {error}", "Make the other sizes equal")
        ) from error  # fmt: skip


def split(x: Any, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of x along `dim`: blocks of `sizes` elements (the last may have fewer) if it is
    an int, else blocks of these sizes.

    Raises BufferMismatchError if sizes are negative or do not add up to that of x.
    """
    data = array(x)
    dim = one_dim(dim, data.ndim)
    total = data.shape[dim]
    if is_int(sizes):
        step = int(cast(int, sizes))
        if step < 1:
            rule = "blocks must have at least 1 element"
            raise BufferMismatchError(explain("sizes", step, rule, "Pass a larger number"))
        sizes = [min(step, total - start) for start in range(0, total, step)] or [0]
    sizes = list(_sizes(sizes))
    if not all(is_int(size) and size >= 0 for size in sizes) or sum(sizes) != total:
        raise BufferMismatchError(
            explain("sizes", sizes, f"they must add up to {total}, dim {dim} of {data.shape}",
                    "Pass sizes with this sum, none negative")
        )  # fmt: skip
    ends = list(accumulate(sizes))
    before = (slice(None),) * dim
    parts = [data[(*before, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True)]
    shape = data.shape
    return record_many(parts, (x,), lambda *grads: (_whole_of(grads, dim, shape),))


def _whole_of(parts: tuple[Array, ...], dim: int, shape: tuple[int, ...]) -> Array:
    """Return the parts one after the other along `dim`: the array that they are the pieces of, if
    there is one, else a new one.
    """
    whole = parts[0].base if type(parts[0]) is np.ndarray else None
    if type(whole) is not np.ndarray or whole.shape != shape or not whole.flags.c_contiguous:
        return np.concatenate(parts, dim)
    start, place = 0, whole.ctypes.data
    for part in parts:
        here = place + start * whole.strides[dim]
        if part.base is not whole or part.strides != whole.strides or part.ctypes.data != here:
            return np.concatenate(parts, dim)
        start += part.shape[dim]
    return whole
