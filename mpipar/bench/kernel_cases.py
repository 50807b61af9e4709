"""What `mpipar bench kernels` times: each kernel at the size that a training step calls it with.

A case counts what the operation cannot do without, not what a version of it happens to do: the
bytes of its operands and results, each once; the floating-point operations of its products; and its
exponentials (or other functions of that price).  A causal mask halves the products and the
exponentials of attention; its backward has five products.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.arrays import compute_dtype, module_of
from mpipar.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    matmul,
    permute,
    reduce,
    rms_norm,
    rotary,
    silu,
    softmax,
)

SEED = 7
BLOCK = 1 << 20  # numbers that are drawn; more repeat them


@dataclass(frozen=True)
class Sizes:
    """How large the operands are."""

    tokens: int
    width: int
    vocab: int
    attention: tuple[int, int, int, int]  # batch, tokens, heads, size of a head
    product: int = 0  # of square matrices; 0: products and changes of layout are not timed
    filler: int = 0  # bytes of a copy that keeps a GPU busy while Python starts a kernel


HOST = Sizes(2048, 1024, 256, (2, 1024, 8, 64))
DEVICE = Sizes(16384, 4096, 16384, (4, 2048, 16, 64), 4096, 1 << 30)  # beyond the cache


@dataclass(frozen=True)
class Case:
    """One kernel: `call(*arrays)` is timed, on new normal numbers where a shape stands.

    crossings: how often memory is crossed by each element of the first input, in the case's number
    type, and `wide_crossings` in that of sums.  wide: which inputs are of that type, and
    not negative.  plain: the array module's own way, to compare with.
    """

    kernel: str
    shape: tuple[int, ...]  # what the row is named by
    inputs: tuple[tuple[int, ...] | np.ndarray, ...]
    call: Callable[..., Any]
    crossings: float
    operations: float = 0.0
    exponentials: float = 0.0
    wide: tuple[int, ...] = ()
    wide_crossings: float = 0.0
    plain: Callable[..., Any] | None = None

    def arrays(self, dtype: Any = np.float32) -> list[np.ndarray]:
        """Return the inputs on the host."""
        numbers, type_ = np.random.default_rng(SEED), np.dtype(dtype)
        found = []
        for n, given in enumerate(self.inputs):
            if not isinstance(given, np.ndarray):
                block = numbers.standard_normal(min(math.prod(given), BLOCK), np.float32)
                given = np.resize(block, given)
                wide = n in self.wide
                given = np.abs(given, dtype=compute_dtype(type_)) if wide else given.astype(type_)
            found.append(given)
        return found

    def bytes(self, dtype: Any = np.float32) -> int:
        """Return the bytes that cross memory."""
        narrow, wide = np.dtype(dtype), compute_dtype(np.dtype(dtype))
        each = narrow.itemsize * self.crossings + wide.itemsize * self.wide_crossings
        return int(self.elements * each)

    @property
    def elements(self) -> int:
        """The elements of the first input."""
        first = self.inputs[0]
        return math.prod(first.shape if isinstance(first, np.ndarray) else first)


def cases(sizes: Sizes = HOST) -> list[Case]:
    """Return all cases, in the order of the table."""
    return [
        *_rows(sizes),
        *_elements(sizes),
        *_tables(sizes),
        *_attention(sizes),
        *(_products_and_layouts(sizes) if sizes.product else ()),
    ]


def _case(
    kernel: str, inputs: Sequence[Any], call: Callable[..., Any], crossings: float,
    exponentials: float = 0.0, **more: Any,
) -> Case:  # fmt: skip
    """Return a case that counts by the elements of its first input, and is named by its shape."""
    shape = tuple(inputs[0])
    count = math.prod(shape)
    return Case(kernel, shape, tuple(inputs), call, crossings, 0.0, exponentials * count, **more)


def _rows(sizes: Sizes) -> list[Case]:
    """Kernels on rows (N, D)."""
    x, w, stats = (sizes.tokens, sizes.width), (sizes.width,), (sizes.tokens,)
    logits = (min(sizes.tokens, 4096), sizes.vocab)
    targets = np.arange(logits[0]) % logits[1]
    return [
        _case("softmax", [x], softmax.forward, 2, 1, plain=_softmax),
        _case("softmax backward", [x, x], softmax.backward, 3),
        _case("layer_norm", [x, w, w], layer_norm.forward, 2, plain=_layer_norm),
        _case(
            "layer_norm backward", [x, x, w, stats, stats],
            lambda g, x, w, mean, rstd: layer_norm.backward(g, x, w, (mean, rstd)), 3, wide=(3, 4),
        ),
        _case("rms_norm", [x, w], rms_norm.forward, 2),
        _case("rms_norm backward", [x, x, w, stats], rms_norm.backward, 3, wide=(3,)),
        _case("cross_entropy", [logits, targets], _cross_entropy, 2, 1),
    ]  # fmt: skip


def _cross_entropy(x: Any, targets: Any) -> Any:
    return cross_entropy.forward(x, targets, slope=True)


def _softmax(x: Any) -> Any:
    xp = module_of(x)
    e = xp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    away = x - x.mean(-1, keepdims=True)
    square = (away * away).mean(-1, keepdims=True) + np.float32(1e-5)
    return away / module_of(x).sqrt(square) * w + b


def _elements(sizes: Sizes) -> list[Case]:
    """Kernels on elements, whatever their shape."""
    x = (sizes.tokens, sizes.width)
    return [
        _case("gelu", [x], gelu.forward, 2, 1, plain=_gelu),
        _case("gelu backward", [x, x], gelu.backward, 3, 1),
        _case("swiglu", [x, x], silu.swiglu, 3, 1),
        _case("swiglu backward", [x, x, x], silu.swiglu_backward, 5, 1),
        _case("adamw", [x] * 4, _adamw, 3, wide=(2, 3), wide_crossings=4),
        _case("sum of 4", [x] * 4, _sum, 5, plain=lambda a, b, c, d: a + b + c + d),
    ]


def _gelu(x: Any) -> Any:
    inner = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + module_of(x).tanh(inner))


def _adamw(w: Any, g: Any, m: Any, v: Any) -> None:
    adamw.adamw_step(w, g, m, v, 1e-4, 0.9, 0.99, 1e-8, 0.1, 3)


def _sum(*operands: Any) -> Any:
    flat = [x.reshape(-1) for x in operands]
    out = module_of(flat[0]).empty(flat[0].shape, flat[0].dtype)
    reduce.fold(np.add, flat, out)
    return out


def _tables(sizes: Sizes) -> list[Case]:
    """Kernels with a table beside: of ids, or of angles."""
    x, (_, seq, heads, width) = (sizes.tokens, sizes.width), sizes.attention
    rows = min(sizes.vocab, sizes.tokens)
    ids = np.arange(sizes.tokens) * 7 % rows
    often = np.where(np.arange(sizes.tokens) % 2, 0, ids)  # one id makes half of them
    tables = rotary.table(np.arange(seq), width, 10000.0, np.dtype(np.float32))
    return [
        _case("embedding", [x, ids], embedding.gather, 2, plain=lambda w, i: w[i]),
        _case("embedding backward", [x, ids], lambda g, i: embedding.scatter_add(g, i, rows), 1),
        _case("embedding backward, frequent", [x, often],
              lambda g, i: embedding.scatter_add(g, i, rows), 1),
        _case("rotary", [(2, seq, heads, width), *tables], rotary.rotate, 2),
    ]  # fmt: skip


def _attention(sizes: Sizes) -> list[Case]:
    """Causal attention: 2 products forward and 5 backward over half of the scores."""
    batch, seq, heads, width = q = sizes.attention
    mask = attention.Mask(True, width**-0.5)
    pairs = batch * heads * seq * seq / 2
    product = 2 * pairs * width

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention.forward(q, k, v, mask)

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        out, lse = attention.forward(q, k, v, mask)
        return attention.backward(do, q, k, v, lse, attention.row_delta(do, out), mask)

    return [
        Case("attention", q, (q,) * 3, forward, 4, 2 * product, pairs),
        Case("attention and backward", q, (q,) * 4, both, 12, 7 * product, 2 * pairs),
    ]


def _products_and_layouts(sizes: Sizes) -> list[Case]:
    """Products of matrices, and copies that change the layout."""
    n, q = sizes.product, sizes.attention
    square = n, n
    long = (q[0], q[1] * 8, *q[2:])  # beyond the cache
    turned = (sizes.tokens, sizes.width)

    def product(a: Any, b: Any) -> Any:
        return matmul.matmul(a, b)

    def packed(x: Any) -> Any:
        return permute.permute(x, (0, 2, 1, 3))

    def across(x: Any) -> Any:
        return permute.permute(x, (1, 0))

    def by_itself(axes: tuple[int, ...]) -> Callable[[Any], Any]:
        return lambda x: module_of(x).ascontiguousarray(x.transpose(axes))

    return [
        Case("matmul", (n, n, n), (square, square), product, 3, 2.0 * n**3,
             plain=lambda a, b: module_of(a).matmul(a, b)),
        _case("permute (0, 2, 1, 3)", [long], packed, 2, plain=by_itself((0, 2, 1, 3))),
        _case("transpose", [turned], across, 2, plain=by_itself((1, 0))),
    ]  # fmt: skip
