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

from mpipar.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    reduce,
    rms_norm,
    rotary,
    silu,
    softmax,
)

Arrays = list[Any]
TOKENS, WIDTH, VOCAB = 2048, 1024, 256
ATTENTION = (2, 1024, 8, 64)  # batch, tokens, heads, size of a head
SEED = 7


@dataclass(frozen=True)
class Case:
    """One kernel: `call(*inputs)` is timed, for new normal numbers of the shapes of `inputs`."""

    kernel: str
    shape: tuple[int, ...]  # what the row is named by
    inputs: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    bytes: int
    operations: float = 0.0
    exponentials: float = 0.0

    def arrays(self, dtype: Any = np.float32) -> Arrays:
        """Return the inputs on the host."""
        numbers = np.random.default_rng(SEED)
        return [numbers.standard_normal(shape).astype(dtype) for shape in self.inputs]

    @property
    def elements(self) -> int:
        """The elements of the first input."""
        return math.prod(self.inputs[0])


def cases() -> list[Case]:
    """Return all cases, in the order of the table."""
    return [
        *_rows(),
        *_elements(),
        *_tables(),
        *_attention(),
    ]


def _case(
    kernel: str, shapes: Sequence[tuple[int, ...]], call: Callable[..., Any], crossings: float,
    exponentials: float = 0.0,
) -> Case:  # fmt: skip
    """Return a case in which each element of the first input stands for `crossings` of memory."""
    count = math.prod(shapes[0])
    whole = int(4 * count * crossings)
    return Case(kernel, shapes[0], tuple(shapes), call, whole, 0.0, exponentials * count)


def _rows() -> list[Case]:
    """Kernels on rows (N, D)."""
    x, w = (TOKENS, WIDTH), (WIDTH,)
    stats = ((TOKENS,), (TOKENS,))
    return [
        _case("softmax", [x], softmax.forward, 2, 1),
        _case("softmax backward", [x, x], softmax.backward, 3),
        _case("layer_norm", [x, w, w], layer_norm.forward, 2),
        _case(
            "layer_norm backward", [x, x, w, *stats],
            lambda g, x, w, mean, rstd: layer_norm.backward(g, x, w, (mean, rstd)), 3,
        ),
        _case("rms_norm", [x, w], rms_norm.forward, 2),
        _case("rms_norm backward", [x, x, w, stats[0]], rms_norm.backward, 3),
        _case("cross_entropy", [(TOKENS, VOCAB)], _cross_entropy, 2, 1),
    ]  # fmt: skip


def _cross_entropy(x: Any) -> Any:
    targets = np.arange(len(x)) % x.shape[1]
    return cross_entropy.forward(x, targets, slope=True)


def _elements() -> list[Case]:
    """Kernels on elements, whatever their shape."""
    x = (TOKENS, WIDTH)
    return [
        _case("gelu", [x], gelu.forward, 2, 1),
        _case("gelu backward", [x, x], gelu.backward, 3, 1),
        _case("swiglu", [x, x], silu.swiglu, 3, 1),
        _case("swiglu backward", [x, x, x], silu.swiglu_backward, 5, 1),
        _case("adamw", [x] * 4, _adamw, 7),
        _case("sum of 4", [x] * 4, _sum, 5),
    ]


def _adamw(w: Any, g: Any, m: Any, v: Any) -> None:
    np.abs(v, out=v) if v[0, 0] < 0 else None  # a mean of squares
    adamw.adamw_step(w, g, m, v, 1e-4, 0.9, 0.99, 1e-8, 0.1, 3)


def _sum(*operands: Any) -> Any:
    first = operands[0].reshape(-1)
    reduce.fold(np.add, [x.reshape(-1) for x in operands], out := np.empty_like(first))
    return out


def _tables() -> list[Case]:
    """Kernels with a table beside: of ids, or of angles."""
    heads, width = ATTENTION[2:]
    ids = np.arange(TOKENS) * 7 % VOCAB
    cos, sin = rotary.table(np.arange(ATTENTION[1]), width, 10000.0, np.dtype(np.float32))
    return [
        _case("embedding", [(TOKENS, WIDTH)], lambda w: embedding.gather(w, ids), 2),
        _case("embedding backward", [(TOKENS, WIDTH)],
              lambda g: embedding.scatter_add(g, ids, VOCAB), 1),
        _case("rotary", [(2, ATTENTION[1], heads, width)],
              lambda x: rotary.rotate(x, cos, sin), 2),
    ]  # fmt: skip


def _attention() -> list[Case]:
    """Causal attention: 2 products forward and 5 backward over half of the scores."""
    batch, seq, heads, width = ATTENTION
    mask = attention.Mask(True, width**-0.5)
    pairs = batch * heads * seq * seq / 2
    product, tensor = 2 * pairs * width, 4 * math.prod(ATTENTION)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention.forward(q, k, v, mask)

    def both(q: Any, k: Any, v: Any, do: Any) -> Any:
        out, lse = attention.forward(q, k, v, mask)
        return attention.backward(do, q, k, v, lse, attention.row_delta(do, out), mask)

    one = "attention", ATTENTION
    return [
        Case(*one, (ATTENTION,) * 3, forward, 4 * tensor, 2 * product, pairs),
        Case(f"{one[0]} and backward", ATTENTION, (ATTENTION,) * 4, both, 12 * tensor,
             7 * product, 2 * pairs),
    ]  # fmt: skip
