"""The GPT-2 family: learned positions, layer norm before each half of a block, GELU.

    x = tokens + positions
    x = x + projection(attention(norm1(x)))         each of the `layers` blocks
    x = x + down(gelu(up(norm2(x))))
    logits = norm(x) E^T                            E: the token embedding, tied by default

Radford et al., Language Models are Unsupervised Multitask Learners, 2019: weights normal with
standard deviation 0.02, those that write to the residual stream scaled by 1/sqrt(2 * layers),
biases zero, GELU by tanh.
"""

from mpipar.arrays import Array
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError, explain
from mpipar.models.attention import SelfAttention
from mpipar.models.config import STD, ModelConfig
from mpipar.models.factories import Factories
from mpipar.models.transformer import Block, Part, Transformer
from mpipar.nn.embedding import Embedding
from mpipar.nn.module import Module
from mpipar.nn.norm import LayerNorm


class MLP(Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig, name: str, make: Factories) -> None:
        """Build `up` and `down` under the global name `name`."""
        self.up = make.column(config, (config.dim, config.hidden), f"{name}.up", bias=True)
        self.down = make.row(config, (config.hidden, config.dim), f"{name}.down", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, C) to (B, S, C)."""
        return self.down(F.gelu(self.up(x)))  # (B, S, hidden) in between


class GPT2(Transformer):
    """The model; `config.seq` positions are known."""

    def __init__(self, config: ModelConfig, make: Factories, part: Part | None = None) -> None:
        """Build all layers, or those of a part of the model."""
        if part is None or part.first:
            self.position_embedding = Embedding(
                config.seq,
                config.dim,
                seed=config.seed,
                name="position_embedding",
                std=STD,
                dtype=config.dtype,
            )
        super().__init__(config, make, LayerNorm, part)

    def block(self, make: Factories, name: str) -> Block:
        """Build a block with biases and a GELU MLP."""
        attention = SelfAttention(self.config, f"{name}.attention", make, bias=True, rotary=False)
        mlp = None if self.config.experts else MLP(self.config, f"{name}.mlp", make)
        return Block(self.config, name, make, LayerNorm, attention, mlp)

    def lookup(self, tokens: Array, positions: Array) -> Tensor:
        """Return the rows of tokens and positions, added (B, S, C).

        Raises ConfigError for a position beyond config.seq.
        """
        last = int(positions.max(initial=0))
        if last >= self.config.seq:
            rule = f"positions must be below seq={self.config.seq}, those that were learned"
            fix = "Pass shorter sequences, or build the model with a larger seq"
            raise ConfigError(explain("positions", last, rule, fix))
        rows = self.position_embedding(positions)  # (S, C) or (B, S, C)
        return self.token_embedding(tokens) + self.shard(rows, -2)
