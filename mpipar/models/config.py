"""The numbers that define a model, checked when they are stated."""

from dataclasses import dataclass
from numbers import Real

import numpy as np

from mpipar.arrays import DTYPES
from mpipar.errors import ConfigError, explain
from mpipar.partition import divisors

MODELS = ("gpt2", "llama")


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes.  What is left at 0 or None is filled in and can be read afterwards.

    seq is the context: the longest sequence that learned positions know (gpt2), and what
    generation looks back on.  The width of the feed-forward layer, `hidden`, is 4 * dim for gpt2
    and 8/3 * dim, rounded up to a multiple of 32, for llama (as many weights, in three matrices).
    """

    model: str = "gpt2"  # "gpt2" or "llama"
    vocab: int = 256
    layers: int = 4
    dim: int = 256
    heads: int = 8
    kv_heads: int = 0  # 0: as many as heads; fewer: grouped-query attention
    seq: int = 256
    hidden: int = 0
    experts: int = 0  # 0: one MLP in a block; else this many, of `hidden` each
    top_k: int = 2  # experts that a token uses
    shared: int = 0  # width of one more expert, which every token uses
    dropout: float = 0.0
    tied: bool | None = None  # output layer = token embedding; None: True for gpt2
    seed: int = 0
    dtype: str = "float32"
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5  # added to the variance, or the mean square, before the root

    def __post_init__(self) -> None:
        """Fill in what depends on other sizes; raise ConfigError for what cannot be built."""
        _choice("model", self.model, MODELS)
        _choice("dtype", self.dtype, DTYPES)
        for name in ("vocab", "layers", "dim", "heads", "seq"):
            _at_least(name, getattr(self, name), 1)
        for name in ("kv_heads", "hidden", "experts", "shared"):
            _at_least(name, getattr(self, name), 0)
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "hidden": self.hidden or default_hidden(self.model, self.dim),
            "tied": self.model == "gpt2" if self.tied is None else self.tied,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_heads()
        self._check_experts()
        if not isinstance(self.dropout, Real) or not 0.0 <= self.dropout < 1.0:
            rule = "it must be at least 0 and below 1"
            raise ConfigError(explain("dropout", self.dropout, rule, "Choose such a number"))
        for name in ("rotary_base", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0.0 < value < np.inf:
                rule = "it must be a number above 0"
                raise ConfigError(explain(name, value, rule, "Choose such a number"))

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.dim // self.heads

    @property
    def residual_std(self) -> float:
        """The standard deviation of weights that write to the residual stream (GPT-2)."""
        return STD / (2 * self.layers) ** 0.5

    @property
    def activation(self) -> str:
        """What is between the matrices of the feed-forward layer."""
        return "gelu" if self.model == "gpt2" else "swiglu"

    def _check_experts(self) -> None:
        _at_least("top_k", self.top_k, 1)
        if self.experts and self.top_k > self.experts:
            rule = f"a token chooses among the {self.experts} experts, each at most once"
            raise ConfigError(explain("top_k", self.top_k, rule, f"Pass {self.experts} or less"))
        if self.shared and not self.experts:
            rule = "there is a shared expert only beside others"
            raise ConfigError(
                explain("shared", self.shared, rule, "State experts, or leave it out")
            )

    def _check_heads(self) -> None:
        if self.dim % self.heads:
            rule = f"heads must divide dim={self.dim}"
            raise ConfigError(explain("heads", self.heads, rule, _nearest(self.heads, self.dim)))
        if self.heads % self.kv_heads:
            rule = f"kv_heads must divide heads={self.heads}"
            fix = _nearest(self.kv_heads, self.heads)
            raise ConfigError(explain("kv_heads", self.kv_heads, rule, fix))
        if self.model == "llama" and self.head_dim % 2:
            rule = f"the width of a head, dim / heads = {self.head_dim}, must be even"
            fix = "Rotary positions turn pairs: choose another number of heads"
            raise ConfigError(explain("heads", self.heads, rule, fix))


STD = 0.02  # of all weights that do not write to the residual stream


def default_hidden(model: str, dim: int) -> int:
    """Return the default width of the feed-forward layer."""
    return 4 * dim if model == "gpt2" else -(-8 * dim // 96) * 32


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        rule = f"it must be one of {', '.join(choices)}"
        raise ConfigError(explain(name, value, rule, "Choose one of them"))


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        rule = f"it must be an integer, at least {low}"
        raise ConfigError(explain(name, value, rule, "Choose a larger value"))


def _nearest(value: int, whole: int) -> str:
    """Name the divisors of `whole` next to `value`."""
    whole_parts = divisors(whole)
    below = [d for d in whole_parts if d < value][-1:]
    above = [d for d in whole_parts if d > value][:1]
    return f"Nearest that work: {', '.join(map(str, below + above))}"
