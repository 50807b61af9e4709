"""Models by name, and how many weights a rank holds of each part.

A block's matrices and the biases of its column layers are cut over tp, its norms and the biases of
its row layers are not; the tables of the vocabulary are cut by rows (the first rank has the most).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig

GPT2: dict[str, Any] = {"model": "gpt2", "vocab": 50257, "seq": 1024}
LLAMA2: dict[str, Any] = {"model": "llama", "vocab": 32000, "seq": 4096}
LLAMA3: dict[str, Any] = {"model": "llama", "vocab": 128256, "seq": 8192, "kv_heads": 8}

# layers, dim, heads as published (Radford et al. 2019; Touvron et al. 2023; Llama 3, 2024)
NAMED: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**GPT2, "layers": 12, "dim": 768, "heads": 12},
    "gpt2-355m": {**GPT2, "layers": 24, "dim": 1024, "heads": 16},
    "gpt2-774m": {**GPT2, "layers": 36, "dim": 1280, "heads": 20},
    "gpt2-1.5b": {**GPT2, "layers": 48, "dim": 1600, "heads": 25},
    "llama-7b": {**LLAMA2, "layers": 32, "dim": 4096, "heads": 32, "hidden": 11008},
    "llama-13b": {**LLAMA2, "layers": 40, "dim": 5120, "heads": 40, "hidden": 13824},
    "llama-70b": {
        **LLAMA2, "layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672,
    },
    "llama3-8b": {**LLAMA3, "layers": 32, "dim": 4096, "heads": 32, "hidden": 14336},
    "llama3-70b": {**LLAMA3, "layers": 80, "dim": 8192, "heads": 64, "hidden": 28672},
    "llama3-405b": {**LLAMA3, "layers": 126, "dim": 16384, "heads": 128, "hidden": 53248},
}  # fmt: skip


def sizes(name: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that a name stands for.

    "gpt2" and "llama" are the families, with the sizes of `mpipar train` where none are given.
    Raises ConfigError for another name.
    """
    if name in ("gpt2", "llama"):
        return {"model": name, "vocab": 256, "layers": 4, "dim": 128, "heads": 4, "seq": 128}
    if name not in NAMED:
        rule = f"the models are gpt2, llama, {', '.join(NAMED)}"
        raise ConfigError(
            explain("model", name, rule, "Choose one, or give --layers --dim --heads")
        )
    return dict(NAMED[name])


@dataclass(frozen=True)
class Weight:
    """A parameter: the elements that a rank of a tensor-parallel group holds at most, and whether
    it has rows and columns (vectors are never decayed, and small ones never sharded)."""

    name: str
    size: int
    matrix: bool = True


def block_weights(config: ModelConfig, tp: int = 1) -> Iterator[Weight]:
    """Yield the weights of one block on a rank of `tp`."""
    d, kv, hidden = config.dim, config.kv_heads * config.head_dim, config.hidden
    gpt2 = config.model == "gpt2"
    inner = d + 2 * kv, hidden if gpt2 else 2 * hidden  # features of the two column layers
    for name in ("norm1", "norm2"):
        yield Weight(f"{name}.weight", d, False)
        if gpt2:
            yield Weight(f"{name}.bias", d, False)
    for column, row, out, back in (
        ("attention.qkv", "attention.projection", inner[0], d),
        ("mlp.up" if gpt2 else "mlp.gate_up", "mlp.down", inner[1], hidden),
    ):
        yield Weight(f"{column}.weight", out * d // tp)
        yield Weight(f"{row}.weight", back * d // tp)
        if gpt2:
            yield Weight(f"{column}.bias", out // tp, False)
            yield Weight(f"{row}.bias", d, False)


def table(config: ModelConfig, name: str, tp: int = 1) -> Weight:
    """Return an embedding of the vocabulary."""
    return Weight(f"{name}.weight", -(-config.vocab // tp) * config.dim)


def stage_weights(
    config: ModelConfig, layers: int, first: bool, last: bool, tp: int = 1
) -> tuple[list[list[Weight]], list[Weight]]:
    """Return the weights of a pipeline stage on a rank: those of its blocks, and the rest."""
    rest = []
    if first or (last and config.tied):
        rest.append(table(config, "token_embedding", tp))
    if first and config.model == "gpt2":
        rest.append(Weight("position_embedding.weight", config.seq * config.dim))
    if last:
        rest.append(Weight("norm.weight", config.dim, False))
        if config.model == "gpt2":
            rest.append(Weight("norm.bias", config.dim, False))
        if not config.tied:
            rest.append(table(config, "head", tp))
    return [list(block_weights(config, tp)) for _ in range(layers)], rest


def parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the whole model."""
    blocks, rest = stage_weights(config, config.layers, True, True)
    return sum(weight.size for group in (*blocks, rest) for weight in group)
