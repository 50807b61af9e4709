"""How a model gets its layers: four functions, dense by default.

A model knows nothing of parallelism.  Who wants it sharded passes functions that return parallel
layers with the same meaning:

    "column"  the output features are what a rank holds a part of; `parts` names the pieces of a
              fused weight, each of which is cut on its own
    "row"     the input features are; the output is whole again
    "dense"   neither

A column layer may return fewer features than asked for.  The model takes its number of local heads
from the width it gets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.nn.embedding import Embedding
from mpipar.nn.linear import Linear
from mpipar.nn.module import Module


class LinearFactory(Protocol):
    """Makes a layer (B, S, in_features) -> (B, S, out_features or this rank's part of them)."""

    def __call__(
        self,
        role: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        seed: int,
        name: str,
        std: float | None,
        dtype: str,
        parts: Sequence[int] | None = None,
    ) -> Module:
        """Return the layer; sizes are global."""


class EmbeddingFactory(Protocol):
    """Makes a module with `__call__(ids) -> (..., dim)` and `.logits(x) -> (..., vocabulary)`."""

    def __call__(self, num: int, dim: int, *, seed: int, name: str, std: float, dtype: str) -> Any:
        """Return the module; logits may be this rank's part of the vocabulary."""


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, all [B, S, local heads, D]
CrossEntropy = Callable[..., Tensor]  # (logits, targets, reduction=), masks targets of -100


def dense_linear(
    role: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    seed: int,
    name: str,
    std: float | None,
    dtype: str,
    parts: Sequence[int] | None = None,
) -> Module:
    """Return a Linear, whatever the role."""
    return Linear(in_features, out_features, bias, seed=seed, name=name, std=std, dtype=dtype)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention over the whole sequence: [B, S, heads, D]."""
    return F.attention(q, k, v, causal=True)


@dataclass(frozen=True)
class Factories:
    """The four functions a model is built from."""

    linear: LinearFactory = dense_linear
    embedding: EmbeddingFactory = Embedding
    attention: Attention = dense_attention
    cross_entropy: CrossEntropy = F.cross_entropy
