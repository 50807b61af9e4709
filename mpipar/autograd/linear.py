"""Matrix products and their vjps; a linear layer as one operation.

16-bit operands are multiplied in float32 and the product is rounded once.  Host arrays go to
NumPy straight, device arrays to kernels/matmul.
"""

from math import prod
from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_device
from mpipar.autograd.elementwise import unbroadcast
from mpipar.autograd.engine import home_of
from mpipar.autograd.record import array, record, record_pair
from mpipar.autograd.tape import state
from mpipar.autograd.tensor import Tensor, check_real, source_of
from mpipar.errors import BufferMismatchError, explain
from mpipar.kernels import matmul as kernel
from mpipar.kernels.matmul.blas import product


def _wide(x: Array) -> Array:
    """Return x in the dtype in which its products are summed."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _product(x: Array, y: Array) -> Array:
    """Return x @ y, rounded once to the dtype that x and y have together."""
    if x.ndim > 2 and y.ndim == 2 and x.shape[-1] == y.shape[0]:  # one product, not one each
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        return _product(rows, y).reshape(*x.shape[:-1], y.shape[1])
    if type(x) is not np.ndarray and is_device(x):
        return _device_product(x, y)
    dtype = x.dtype if x.dtype == y.dtype else np.promote_types(x.dtype, y.dtype)
    if x.ndim == y.ndim == 2 and x.dtype == y.dtype:
        return product(_wide(x), _wide(y)).astype(dtype, copy=False)
    return np.matmul(_wide(x), _wide(y)).astype(dtype, copy=False)


def _device_product(x: Array, y: Array) -> Array:
    """Return x @ y with NumPy's rules for 1-D operands."""
    out = kernel.matmul(x[None] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y)
    out = out[..., 0, :] if x.ndim == 1 else out  # (..., k) or (..., n, k)
    return out[..., 0] if y.ndim == 1 else out


def matmul(a: Any, b: Any) -> Tensor:
    """Return the matrix product a @ b with NumPy's rules.

    [..., n, k] @ [..., k, m] -> [..., n, m]; leading dimensions broadcast; a 1-D operand is a row
    on the left, a column on the right, and its dimension disappears.

    Raises BufferMismatchError, naming both shapes, if they do not fit.
    """
    x, y = array(a), array(b)
    try:
        out = _product(x, y)
    except (TypeError, ValueError) as error:
        check_real("matmul", x)
        check_real("matmul", y)
        raise BufferMismatchError(
            explain("matmul of shapes", (x.shape, y.shape),
                    "the last size of the left must be the second last of the right, and the "
                    "leading sizes must broadcast", "Transpose or reshape one of them")
        ) from error  # fmt: skip

    a_like, b_like = _Like(x), _Like(y)

    def vjp_a(g: Array) -> Array:
        wide = y[:, None] if y.ndim == 1 else y  # (..., k, m)
        grad = _product(_rows(g, a_like, b_like), np.swapaxes(wide, -1, -2))  # (..., n, k)
        return a_like.undo(grad[..., 0, :] if a_like.ndim == 1 else grad)

    def vjp_b(g: Array) -> Array:
        wide = x[None, :] if x.ndim == 1 else x  # (..., n, k)
        g = _rows(g, a_like, b_like)
        if b_like.ndim == 2 and wide.ndim > 2:  # one product for all leading dimensions
            n = prod(wide.shape[:-1])
            wide, g = wide.reshape(n, wide.shape[-1]), g.reshape(n, g.shape[-1])
        grad = _product(np.swapaxes(wide, -1, -2), g)  # (..., k, m)
        return b_like.undo(grad[..., 0] if b_like.ndim == 1 else grad)

    return record_pair(out, a, vjp_a, b, vjp_b)


class _Like:
    """Shape and dtype of an operand, without holding it."""

    __slots__ = ("dtype", "ndim", "shape")

    def __init__(self, x: Array) -> None:
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.ndim

    def undo(self, grad: Array) -> Array:
        """Return the gradient of the operand from that of it broadcast over leading dimensions."""
        if grad.shape == self.shape and grad.dtype is self.dtype:
            return grad
        return unbroadcast(grad, self.shape, self.dtype)


def _rows(g: Array, a: _Like, b: _Like) -> Array:
    """Return the gradient of a @ b as [..., n, m], with the dimensions that 1-D operands lost."""
    if a.ndim == 1:
        return g[..., None, :] if b.ndim > 1 else g.reshape(1, 1)
    return g[..., None] if b.ndim == 1 else g


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return x @ weight.T + bias: [..., in], [out, in], [out] -> [..., out], as one operation.

    Backward reads a weight that is a leaf from its `.data` at that time, so that sharded training
    may drop the full weight between forward and backward.

    Raises BufferMismatchError, naming the shapes, if they do not fit.
    """
    data, w = array(x), array(weight)
    b = None if bias is None else array(bias)
    if w.ndim != 2 or not data.ndim or data.shape[-1] != w.shape[1]:
        raise _linear_mismatch(data, w, b)
    if b is not None and b.shape != w.shape[:1]:
        raise _linear_mismatch(data, w, b)
    shape, (n_out, n_in) = data.shape, w.shape
    n = prod(shape[:-1])
    flat = data.reshape(n, n_in)  # (N, in); in or out may be 0 on a rank of a sharded layer
    out = _affine(flat, w, b).reshape(*shape[:-1], n_out)
    wants_x, wants_w, wants_b = (source_of(t) is not None for t in (x, weight, bias))
    leaf = weight if isinstance(weight, Tensor) and weight.node is None else None
    kept_w = w if wants_x and leaf is None else None
    kept_x = flat if wants_w else None
    x_dtype, w_dtype, b_dtype = data.dtype, w.dtype, None if b is None else b.dtype

    def vjp(g: Array) -> tuple[Array | None, ...]:
        g = g.reshape(n, n_out)  # (N, out)
        dx = None
        if wants_x:
            dx = _into(g, kept_w if leaf is None else leaf.data, shape, x_dtype)
        delay = state.delay
        if delay is not None and leaf in delay.leaves and (not wants_b or bias in delay.leaves):
            delay.add((leaf, bias if wants_b else None), vjp_weights, g)
            return dx, None, None
        return dx, *vjp_weights(g)

    def vjp_weights(g: Array) -> tuple[Array | None, Array | None]:
        dw = db = None
        if kept_x is not None:
            dw = weight_gradient(leaf, g, kept_x)
            dw = None if dw is None else dw.astype(w_dtype, copy=False)
        if wants_b:
            db = _column_sums(g).astype(b_dtype, copy=False)
        return dw, db

    return record(out, (x, weight, bias), vjp)


def _affine(x: Array, w: Array, b: Array | None) -> Array:
    """Return x @ w.T + b for x (N, in), w (out, in), b (out,), rounded once."""
    if b is None:
        return _product(x, w.T)
    if type(x) is not np.ndarray and is_device(x):
        if np.promote_types(b.dtype, w.dtype) != w.dtype:
            return _product(x, w.T) + b
        return kernel.matmul(x, w, transpose_b=True, bias=b)
    rows, weight, more = _wide(x), _wide(w), _wide(b)
    if rows.dtype == weight.dtype == more.dtype:
        out = product(rows, weight.T, bias=more)
    else:
        out = np.matmul(rows, weight.T) + more
    if x.dtype.itemsize > 2 and w.dtype.itemsize > 2:
        return out
    return out.astype(np.promote_types(x.dtype, w.dtype), copy=False)


def _into(g: Array, w: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return g @ w as a new array of x's shape (not a view, so that it may be added to)."""
    if g.dtype.itemsize == 2 or g.dtype != dtype or w.dtype != dtype or type(g) is not np.ndarray:
        return _product(g, w).reshape(shape).astype(dtype, copy=False)
    out = np.empty(shape, dtype)
    product(g, w, out.reshape(len(g), shape[-1]))
    return out


def _column_sums(g: Array) -> Array:
    """Return the sum of the rows of g (N, out): (out,), in at least float32."""
    if type(g) is np.ndarray and g.dtype.itemsize > 2:
        return np.ones(len(g), g.dtype) @ g  # a third faster
    return np.add.reduce(g, axis=0, dtype=compute_dtype(g.dtype))


def weight_gradient(leaf: Tensor | None, g: Array, x: Array) -> Array | None:
    """Return g.T @ x, the gradient of a weight [out, in], for g (N, out) and x (N, in).

    None if it went to the gradient of the weight, `leaf`, without a temporary: added to what is
    there, or as the first part to its home.
    """
    if type(g) is not np.ndarray and is_device(g):
        return _device_weight_gradient(leaf, g, x)
    if leaf is not None and _adds_to(leaf.grad, g, x):
        product(g.T, x, leaf.grad, add=True)
    elif leaf is not None and _starts_at(home_of(leaf), leaf, g, x):
        leaf.grad = product(g.T, x, home_of(leaf))
    else:
        return _product(g.T, x)
    return None


def _device_weight_gradient(leaf: Tensor | None, g: Array, x: Array) -> Array | None:
    """Do the same on the device, where the kernel adds to what is there."""
    target = None if leaf is None else home_of(leaf) if leaf.grad is None else leaf.grad
    if leaf is None or target is None or not is_device(target):
        return _product(g.T, x)
    if not target.dtype == g.dtype == x.dtype:
        return _product(g.T, x)
    kernel.matmul(g, x, transpose_a=True, out=target, accumulate=leaf.grad is not None)
    leaf.grad = target
    return None


def _adds_to(grad: Array | None, g: Array, x: Array) -> bool:
    """Say whether g.T @ x may be added to an existing gradient block by block."""
    if type(grad) is not np.ndarray or not grad.flags.writeable:
        return False
    return grad.dtype == g.dtype == x.dtype and g.dtype.itemsize > 2


def _starts_at(home: Array | None, leaf: Tensor, g: Array, x: Array) -> bool:
    """Say whether g.T @ x, the first part of a gradient, may be written to its home."""
    return home is not None and leaf.grad is None and _adds_to(home, g, x)


def _linear_mismatch(x: Array, w: Array, b: Array | None) -> BufferMismatchError:
    shapes = (x.shape, w.shape) if b is None else (x.shape, w.shape, b.shape)
    return BufferMismatchError(
        explain("linear of shapes", shapes, "x must be [..., in], weight [out, in], bias [out]",
                "Check the sizes of the layer")
    )  # fmt: skip
