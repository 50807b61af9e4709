"""How a model gets its layers: a few functions, dense by default.

A model knows nothing of parallelism.  Who wants it sharded passes functions that return parallel
layers with the same meaning:

    "column"  the output features are what a rank holds a part of; `parts` names the pieces of a
              fused weight, each of which is cut on its own
    "row"     the input features are; the output is whole again
    "dense"   neither

A column layer may return fewer features than asked for.  The model takes its number of local heads
from the width it gets.

What lies between a row layer and the next column layer may be a part of the sequence.  Then row
layers and embeddings return that part, `norm` works on it, column layers and logits take it,
`shard` cuts what belongs to it (the positions of its tokens), and `length` says how long all is.
Experts take and return that part too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError, explain
from mpipar.models.config import STD, ModelConfig
from mpipar.nn.embedding import Embedding
from mpipar.nn.linear import Linear
from mpipar.nn.module import Module
from mpipar.nn.norm import LayerNorm, RMSNorm


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


class NormFactory(Protocol):
    """Makes a layer (..., dim) -> (..., dim) of a kind."""

    def __call__(
        self, kind: type[LayerNorm | RMSNorm], dim: int, *, eps: float, name: str, dtype: str
    ) -> Module:
        """Return the layer, for whole sequences or the part of them that lies between layers."""


class Shard(Protocol):
    """Cuts what the whole sequence has along `dim` to the part that lies between layers."""

    def __call__(self, x: Any, dim: int = -1) -> Any:
        """Return the part of x, an array or a Tensor."""


class ExpertsFactory(Protocol):
    """Makes experts in the place of an MLP: (x (B, S, C), positions (S,) or (B, S)) -> (B, S, C).

    Where x is a part of the sequence, so is the result; positions are those of the whole.
    """

    def __call__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        k: int,
        *,
        activation: str,
        shared: int,
        seed: int,
        name: str,
        std: float,
        down_std: float,
        dtype: str,
    ) -> Module:
        """Return the layer; sizes are global, hidden is that of each expert."""


Length = Callable[[Tensor], int]  # (B, S or a part of it, C) -> S; collective
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


def dense_norm(
    kind: type[LayerNorm | RMSNorm], dim: int, *, eps: float, name: str, dtype: str
) -> Module:
    """Return a norm of the kind."""
    return kind(dim, eps, name=name, dtype=dtype)


def no_experts(*_: Any, **__: Any) -> Module:
    """Raise ConfigError: experts are made by who knows which ranks hold them."""
    rule = "a model with experts is told how they are made, and was not"
    fix = "Pass experts=, one of mp.factories(mesh)"
    raise ConfigError(explain("experts", None, rule, fix))


def whole(x: Any, dim: int = -1) -> Any:
    """Return x: the whole sequence lies between layers."""
    return x


def whole_length(x: Tensor) -> int:
    """Return the length of x (B, S, C): the whole sequence lies between layers."""
    return int(x.shape[1])


@dataclass(frozen=True)
class Factories:
    """The functions a model is built from."""

    linear: LinearFactory = dense_linear
    embedding: EmbeddingFactory = Embedding
    attention: Attention = dense_attention
    cross_entropy: CrossEntropy = F.cross_entropy
    norm: NormFactory = dense_norm
    shard: Shard = whole
    length: Length = whole_length
    experts: ExpertsFactory = no_experts
    recompute: bool = False  # blocks keep their inputs only, and run again in backward

    def column(
        self,
        config: ModelConfig,
        sizes: tuple[int, int],
        name: str,
        *,
        bias: bool,
        parts: Sequence[int] | None = None,
    ) -> Module:
        """Return a layer of (in, out) features that reads the residual stream."""
        how = _settings(config, name, STD)
        return self.linear("column", *sizes, bias=bias, parts=parts, **how)

    def row(self, config: ModelConfig, sizes: tuple[int, int], name: str, *, bias: bool) -> Module:
        """Return a layer of (in, out) features that writes to the residual stream."""
        how = _settings(config, name, config.residual_std)
        return self.linear("row", *sizes, bias=bias, **how)

    def mixture(self, config: ModelConfig, name: str) -> Module:
        """Return experts, which read the residual stream and write to it."""
        sizes = config.dim, config.hidden, config.experts, config.top_k
        how: dict[str, Any] = {"activation": config.activation, "shared": config.shared}
        how |= {"down_std": config.residual_std, **_settings(config, name, STD)}
        return self.experts(*sizes, **how)

    def normal(self, config: ModelConfig, kind: type[LayerNorm | RMSNorm], name: str) -> Module:
        """Return a norm of the residual stream."""
        how: dict[str, Any] = {"name": name, "dtype": config.dtype}
        return self.norm(kind, config.dim, eps=config.norm_eps, **how)

    def table(self, config: ModelConfig, name: str) -> Any:
        """Return an embedding of the vocabulary."""
        return self.embedding(config.vocab, config.dim, **_settings(config, name, STD))


def _settings(config: ModelConfig, name: str, std: float) -> dict[str, Any]:
    return {"name": name, "std": std, "seed": config.seed, "dtype": config.dtype}
