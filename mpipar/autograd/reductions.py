"""Reductions over dimensions, and their vjps.

`dim` is None (all dimensions), an int, or a tuple; `axis` and `keepdims` are accepted as NumPy
spells them.  Sums of 16-bit numbers are taken in float32 and rounded once.
"""

import math
from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype, module_of
from mpipar.autograd.record import array, record
from mpipar.autograd.tensor import Tensor
from mpipar.errors import BufferMismatchError, explain

_total: Any = np.add.reduce


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return `dim` as a tuple of dimensions, none negative.

    Raises BufferMismatchError if one is out of range or named twice.
    """
    if dim is None:
        return tuple(range(ndim))
    given = dim if isinstance(dim, tuple | list) else (dim,)
    dims = tuple(d + ndim if is_int(d) and d < 0 else d for d in given)
    if not all(is_int(d) and 0 <= d < ndim for d in dims) or len(set(dims)) < len(dims):
        if not ndim:
            rule, fix = "a tensor without dimensions has none to choose", "Reshape it to (1,)"
            raise BufferMismatchError(explain("dim", dim, rule, fix))
        raise BufferMismatchError(
            explain("dim", dim, f"dimensions must be different, and from {-ndim} to {ndim - 1}",
                    f"The tensor has {ndim}: choose among them")
        )  # fmt: skip
    return dims


def one_dim(dim: Any, ndim: int) -> int:
    """Return a single dimension, not negative; raises BufferMismatchError as dims_of does."""
    (place,) = dims_of(int(dim) if is_int(dim) else str(dim), ndim)
    return place


def is_int(x: Any) -> bool:
    """Say whether x is an integer of Python or NumPy."""
    return isinstance(x, int | np.integer)


def _kept(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which the reduced dimensions have size 1."""
    return tuple([1 if d in dims else n for d, n in enumerate(shape)])


def sum(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the sum over `dim`."""
    data = array(x)
    dims = dims_of(dim, data.ndim)
    shape, kept = data.shape, _kept(data.shape, dims)
    wide = compute_dtype(data.dtype) if data.dtype.itemsize == 2 else None
    out = _total(data, axis=dims, keepdims=keepdim, dtype=wide)
    if wide is not None:
        out = out.astype(data.dtype)
    return record(out, (x,), lambda g: np.broadcast_to(g.reshape(kept), shape))


def mean(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the mean over `dim`."""
    data = array(x)
    dims = dims_of(dim, data.ndim)
    shape, kept, dtype = data.shape, _kept(data.shape, dims), data.dtype
    count = math.prod([shape[d] for d in dims])
    out = _total(data, axis=dims, keepdims=keepdim, dtype=compute_dtype(dtype)) / count

    def vjp(g: Array) -> Array:
        g = (g.astype(compute_dtype(dtype), copy=False) / count).astype(dtype, copy=False)
        return np.broadcast_to(g.reshape(kept), shape)

    return record(out.astype(dtype) if dtype.itemsize == 2 else out, (x,), vjp)


def max(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the maximum over `dim`; equal maxima share the gradient."""
    return _extreme(np.maximum, x, dim, keepdim)


def min(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the minimum over `dim`; equal minima share the gradient."""
    return _extreme(np.minimum, x, dim, keepdim)


def _extreme(ufunc: Any, x: Any, dim: Any, keepdim: bool) -> Tensor:
    data = array(x)
    dims = dims_of(dim, data.ndim)
    kept = _kept(data.shape, dims)
    _check_filled(data, dims)
    out = ufunc.reduce(data, axis=dims, keepdims=keepdim)

    def vjp(g: Array) -> Array:
        hit = data == out.reshape(kept)
        count = _total(hit, axis=dims, keepdims=True, dtype=compute_dtype(g.dtype))
        return ((g.reshape(kept) / count) * hit).astype(g.dtype, copy=False)

    return record(out, (x,), vjp)


def _check_filled(data: Array, dims: tuple[int, ...]) -> None:
    """Raise BufferMismatchError if there is nothing to take the extreme of."""
    if not math.prod([data.shape[d] for d in dims]):
        rule = f"there must be an element along dimensions {dims} to find an extreme"
        raise BufferMismatchError(explain("shape", data.shape, rule, "Leave empty tensors out"))


def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Array:
    """Return the place of the first maximum along `dim`, or in x as one row if dim is None.

    A plain array of integers, as comparisons give plain arrays: places have no gradient.
    """
    data = array(x)
    if dim is not None:
        dim = one_dim(dim, data.ndim)
    _check_filled(data, dims_of(dim, data.ndim))
    return module_of(data).asarray(data.argmax(dim, keepdims=keepdim))


def var(x: Any, dim: Any = None, keepdim: bool = False, correction: int = 1) -> Tensor:
    """Return the variance over `dim`: squared deviations over n - correction, as in PyTorch.

    Raises BufferMismatchError unless there are more than `correction` elements.
    """
    data = array(x)
    dims = dims_of(dim, data.ndim)
    kept, dtype = _kept(data.shape, dims), data.dtype
    wide = compute_dtype(dtype)
    count = math.prod([data.shape[d] for d in dims])
    if count <= correction:
        rule = f"there must be more than correction={correction} elements, but there are {count}"
        fix = "Pass correction=0 for the plain mean of squares, or a larger tensor"
        raise BufferMismatchError(explain("shape", data.shape, rule, fix))
    away = data - _total(data, axis=dims, keepdims=True, dtype=wide) / count
    out = _total(away * away, axis=dims, keepdims=keepdim) / (count - correction)

    def vjp(g: Array) -> Array:
        scale = g.reshape(kept).astype(wide, copy=False) * (2.0 / (count - correction))
        return (scale * away).astype(dtype, copy=False)

    return record(out.astype(dtype, copy=False), (x,), vjp)
