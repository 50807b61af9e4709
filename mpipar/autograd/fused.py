"""The operations of a transformer whose arithmetic lives in kernels/: forward and vjp call it."""

from numbers import Real
from typing import Any

import numpy as np

from mpipar.arrays import Array, beside, compute_dtype
from mpipar.autograd.record import array, record
from mpipar.autograd.reductions import one_dim
from mpipar.autograd.tensor import Tensor, check_float
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.kernels import dropout as dropout_kernel
from mpipar.kernels import embedding as embedding_kernel
from mpipar.kernels import gelu as gelu_kernel
from mpipar.kernels import layer_norm as layer_norm_kernel
from mpipar.kernels import rms_norm as rms_norm_kernel
from mpipar.kernels import rotary as rotary_kernel
from mpipar.kernels import silu as silu_kernel
from mpipar.kernels import softmax as softmax_kernel


def softmax(x: Any, dim: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `dim`, of x's shape.

    Raises DtypeMismatchError for integers, BufferMismatchError if there is nothing along `dim`.
    """
    return _softmax(x, dim, log=False)


def log_softmax(x: Any, dim: int = -1) -> Tensor:
    """Return x - log(sum(exp(x))) along `dim`, of x's shape; raises as softmax does."""
    return _softmax(x, dim, log=True)


def _softmax(x: Any, dim: int, log: bool) -> Tensor:
    data = array(x)
    check_float("log_softmax" if log else "softmax", data)
    dim = one_dim(dim, data.ndim)
    if not data.shape[dim]:
        rule = f"there must be an element along dim {dim}"
        raise BufferMismatchError(explain("shape", data.shape, rule, "Leave empty tensors out"))
    last = dim == data.ndim - 1

    def moved(a: Array) -> Array:  # `dim` to the end and back
        return a if last else np.swapaxes(a, dim, -1)

    y = softmax_kernel.forward(moved(data), log)
    return record(moved(y), (x,), lambda g: moved(softmax_kernel.backward(moved(g), y, log)))


def gelu(x: Any, approximate: str = "tanh") -> Tensor:
    """Return the Gaussian error linear unit of x: Hendrycks and Gimpel (2016).

    approximate: "tanh" (GPT-2's), or "none" for the exact error function.
    Raises ConfigError for another one.
    """
    data = array(x)
    check_float("gelu", data)
    y = gelu_kernel.forward(data, approximate)
    return record(y, (x,), lambda g: gelu_kernel.backward(g, data, approximate))


def silu(x: Any) -> Tensor:
    """Return x * sigmoid(x): Elfwing et al. (2017)."""
    data = array(x)
    check_float("silu", data)
    return record(silu_kernel.forward(data), (x,), lambda g: silu_kernel.backward(g, data))


def swiglu(gate: Any, up: Any) -> Tensor:
    """Return silu(gate) * up, both of one shape: Shazeer (2020).

    Raises BufferMismatchError if the shapes or dtypes differ.
    """
    x, y = array(gate), array(up)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise BufferMismatchError(
            explain("swiglu of", ((x.shape, x.dtype.name), (y.shape, y.dtype.name)),
                    "gate and up must have one shape and dtype", "Make them equal")
        )  # fmt: skip
    check_float("swiglu", x)
    out = silu_kernel.swiglu(x, y)
    return record(out, (gate, up), lambda g: silu_kernel.swiglu_backward(g, x, y))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Tensor:
    """Return x (..., D) with rows of mean 0 and variance 1, times weight (D,), plus bias (D,).

    Ba, Kiros, Hinton (2016).  Raises BufferMismatchError if the sizes differ.
    """
    data, w, b = array(x), array(weight), array(bias)
    _match("layer_norm", data, w, b)
    y, stats = layer_norm_kernel.forward(data, w, b, eps)
    vjp = lambda g: layer_norm_kernel.backward(g, data, w, stats)  # noqa: E731
    return record(y, (x, weight, bias), vjp)


def rms_norm(x: Any, weight: Any, eps: float = 1e-5) -> Tensor:
    """Return x (..., D) with rows of mean square 1, times weight (D,).

    Zhang and Sennrich (2019).  Raises BufferMismatchError if the sizes differ.
    """
    data, w = array(x), array(weight)
    _match("rms_norm", data, w)
    y, r = rms_norm_kernel.forward(data, w, eps)
    return record(y, (x, weight), lambda g: rms_norm_kernel.backward(g, data, w, r))


def _match(name: str, x: Array, *vectors: Array) -> None:
    """Raise unless all are floating-point and every vector has the size of x's last dimension."""
    check_float(name, x, *vectors)
    if any(v.shape != x.shape[-1:] for v in vectors) or not x.ndim:
        raise BufferMismatchError(
            explain(f"{name} of shapes", (x.shape, *[v.shape for v in vectors]),
                    "the weights must have the size of the last dimension of x",
                    "Check the size of the layer")
        )  # fmt: skip


def rotary(x: Any, positions: Any, base: float = 10000.0) -> Tensor:
    """Return x [batch, seq, heads, dim] with rotary position embedding: Su et al. (2021).

    positions: integers [seq] or [batch, seq], global.  Element i turns with element i + dim/2.
    Raises BufferMismatchError if the shapes do not belong together or dim is odd.
    """
    data, places = array(x), array(positions)
    if data.ndim != 4 or places.shape not in (data.shape[1:2], data.shape[:2]):
        raise BufferMismatchError(
            explain("rotary of shapes", (data.shape, places.shape),
                    "x must be [batch, seq, heads, dim], positions [seq] or [batch, seq]",
                    "Give each element of the sequence its position")
        )  # fmt: skip
    if data.shape[3] % 2:
        rule = "it must be even, as rotary embedding turns pairs"
        raise BufferMismatchError(explain("dim", data.shape[3], rule, "Choose another size"))
    check_float("rotary", data)
    wide = compute_dtype(data.dtype)
    cos, sin = rotary_kernel.table(places, data.shape[3], base, wide)
    cos, sin = beside(cos, data), beside(sin, data)
    y = rotary_kernel.rotate(data, cos, sin)
    return record(y, (x,), lambda g: rotary_kernel.rotate(g, cos, sin, back=True))


def embedding(ids: Any, weight: Any) -> Tensor:
    """Return the rows [..., dim] of weight [num, dim] at the integers ids [...].

    Raises ConfigError naming the first id outside 0..num-1.
    """
    places, w = array(ids), array(weight)
    if places.dtype.kind not in "iu" or w.ndim != 2:
        rule = "ids must be integers, weight [num, dim]"
        given = (places.dtype.name, w.shape)
        raise ConfigError(explain("(ids.dtype, weight.shape)", given, rule, "Convert them"))
    num = w.shape[0]
    if places.size and (places.min() < 0 or places.max() >= num):
        flat = places.reshape(-1)
        first = int(np.flatnonzero((flat < 0) | (flat >= num))[0])
        rule = f"an id must be between 0 and {num - 1}"
        raise ConfigError(explain(f"ids[{first}]", int(flat[first]), rule, "Check the vocabulary"))
    places = beside(places, w)  # ids on the host are checked without waiting for the device
    y = embedding_kernel.gather(w, places)
    return record(y, (weight,), lambda g: embedding_kernel.scatter_add(g, places, num))


def dropout(x: Any, p: float, key: int, index: Any = None) -> Tensor:
    """Return x with each element zeroed with probability p, the others divided by 1 - p.

    key: from `mpipar.rng.key`.  index: the uint64 global index of each element, so that a shard
    drops what the whole array would (broadcast to x's shape); None: row-major 0, 1, 2, ...
    Srivastava et al. (2014).  Raises ConfigError unless 0 <= p < 1.
    """
    check_probability(p)
    data = array(x)
    check_float("dropout", data)
    if p == 0:
        return record(data, (x,), lambda g: g)
    where = None if index is None else beside(index, data)
    kept = dropout_kernel.keep(data.shape, p, key, where, data)

    def scaled(a: Array) -> Array:
        return dropout_kernel.scale(a, kept, 1 / (1 - p))

    return record(scaled(data), (x,), scaled)


def check_probability(p: Any) -> None:
    """Raise ConfigError unless p is a probability of dropping: a number with 0 <= p < 1."""
    if not isinstance(p, Real) or not 0 <= float(p) < 1:
        rule = "the probability of dropping must be at least 0 and below 1"
        raise ConfigError(explain("p", p, rule, "Choose such a number"))
