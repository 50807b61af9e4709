"""The Llama family: rotary positions, RMS norm before each half of a block, SwiGLU, no biases.

    x = tokens
    x = x + projection(attention(rotate(q), rotate(k), v))      q, k, v of norm1(x)
    x = x + down(silu(gate) * up)                               gate, up of norm2(x), one product
    logits = norm(x) H^T                                        H: a table of its own by default

Touvron et al., Llama 2, 2023 (grouped-query attention); Shazeer, GLU Variants Improve Transformer,
2020.  Initial weights as for GPT-2.
"""

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.models.attention import SelfAttention
from mpipar.models.config import ModelConfig
from mpipar.models.factories import Factories
from mpipar.models.transformer import Block, Part, Transformer
from mpipar.nn.module import Module
from mpipar.nn.norm import RMSNorm


class GatedMLP(Module):
    """down(silu(gate(x)) * up(x)), gate and up in one weight."""

    def __init__(self, config: ModelConfig, name: str, make: Factories) -> None:
        """Build `gate_up` and `down` under the global name `name`."""
        dim, parts = config.dim, (config.hidden, config.hidden)
        self.gate_up = make.column(
            config, (dim, sum(parts)), f"{name}.gate_up", bias=False, parts=parts
        )
        self.down = make.row(config, (config.hidden, dim), f"{name}.down", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, C) to (B, S, C)."""
        fused = self.gate_up(x)  # (B, S, 2 * local hidden)
        gate, up = F.split(fused, fused.shape[-1] // 2, dim=-1)
        return self.down(F.swiglu(gate, up))


class Llama(Transformer):
    """The model; sequences may be longer than `config.seq`."""

    def __init__(self, config: ModelConfig, make: Factories, part: Part | None = None) -> None:
        """Build all layers, or those of a part of the model."""
        super().__init__(config, make, RMSNorm, part)

    def block(self, make: Factories, name: str) -> Block:
        """Build a block with rotary attention and a gated MLP."""
        attention = SelfAttention(self.config, f"{name}.attention", make, bias=False, rotary=True)
        mlp = None if self.config.experts else GatedMLP(self.config, f"{name}.mlp", make)
        return Block(self.config, name, make, RMSNorm, attention, mlp)
