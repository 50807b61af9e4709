"""Causal self-attention with a fused projection and grouped key/value heads.

    x (B, S, C) --qkv--> q (B, S, H, D), k and v (B, S, K, D)
      --attention--> (B, S, H, D) --projection--> (B, S, C)

H query heads share K key/value heads in groups of H / K (Ainslie et al., GQA, 2023).  With
rotary=True q and k are turned by their global positions first (Su et al., RoFormer, 2021).
Where the column layer returns a part of the features, H and K are this rank's numbers of heads.
"""

from typing import Protocol

import numpy as np

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig
from mpipar.models.factories import Factories
from mpipar.nn.module import Module


class Kept(Protocol):
    """What keeps the keys and values of tokens: see `cache`."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keep those of the next tokens; return all, and how many tokens were before."""


class SelfAttention(Module):
    """The attention half of a block, without its norm and residual."""

    def __init__(
        self, config: ModelConfig, name: str, make: Factories, *, bias: bool, rotary: bool
    ) -> None:
        """Build `qkv` and `projection` under the global name `name`."""
        self.config = config
        self.rotary = rotary
        self.attention = make.attention
        self.kept: Kept | None = None  # in generation: keys and values of the tokens before
        width, shared = config.dim, config.kv_heads * config.head_dim
        parts = (width, shared, shared)
        self.qkv = make.column(config, (width, sum(parts)), f"{name}.qkv", bias=bias, parts=parts)
        self.projection = make.row(config, (width, width), f"{name}.projection", bias=bias)

    def forward(self, x: Tensor, positions: np.ndarray) -> Tensor:
        """Map x (B, S, C) at global positions (S,) or (B, S) to (B, S, C).

        Where x is a part of the sequence, so is the result; positions are those of the whole.
        """
        q, k, v = self.split(self.qkv(x))
        if self.rotary:
            q = F.rotary(q, positions, self.config.rotary_base)
            k = F.rotary(k, positions, self.config.rotary_base)
        if self.kept is None:
            out = self.attention(q, k, v)  # (B, S, H, D)
        else:
            k, v, before = self.kept.extend(k, v)
            out = F.attention(q, k, v, causal=True, q_offset=before)
        return self.projection(out.reshape(*out.shape[:2], -1))

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut (B, S, (H + 2K) D) into q [B, S, H, D], k and v [B, S, K, D].

        Raises ConfigError if the width is not a whole number of head groups.
        """
        batch, seq, width = fused.shape
        config = self.config
        group = config.heads // config.kv_heads
        kv_heads, rest = divmod(width, (group + 2) * config.head_dim)
        if rest:
            rule = f"a rank must hold whole groups of heads, but got {width} features of q, k, v"
            fix = "Choose a tensor-parallel degree that divides kv_heads"
            raise ConfigError(explain("kv_heads", config.kv_heads, rule, fix))
        heads = kv_heads * group
        pieces = fused.reshape(batch, seq, heads + 2 * kv_heads, config.head_dim)
        q, k, v = F.split(pieces, (heads, kv_heads, kv_heads), dim=2)
        return q, k, v
