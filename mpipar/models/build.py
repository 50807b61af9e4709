"""From a config to a model, with the layers of one's choice."""

from typing import Any

from mpipar.models.config import ModelConfig
from mpipar.models.factories import (
    Attention,
    CrossEntropy,
    EmbeddingFactory,
    ExpertsFactory,
    Factories,
    Length,
    LinearFactory,
    NormFactory,
    Shard,
)
from mpipar.models.gpt2 import GPT2
from mpipar.models.llama import Llama
from mpipar.models.transformer import Transformer

FAMILIES: dict[str, type[GPT2] | type[Llama]] = {"gpt2": GPT2, "llama": Llama}


def build(
    config: ModelConfig,
    linear: LinearFactory | None = None,
    embedding: EmbeddingFactory | None = None,
    attention: Attention | None = None,
    cross_entropy: CrossEntropy | None = None,
    norm: NormFactory | None = None,
    shard: Shard | None = None,
    length: Length | None = None,
    experts: ExpertsFactory | None = None,
    recompute: bool = False,
) -> Transformer:
    """Return the model of a config; a factory that is None makes dense layers.

    recompute: between forward and backward keep only the inputs of every block, and run it again.
    The initial weights depend on config.seed and the layers' global names alone.
    """
    given: dict[str, Any] = {
        "linear": linear,
        "embedding": embedding,
        "attention": attention,
        "cross_entropy": cross_entropy,
        "norm": norm,
        "shard": shard,
        "length": length,
        "experts": experts,
        "recompute": recompute,
    }
    make = Factories(**{name: make for name, make in given.items() if make is not None})
    return FAMILIES[config.model](config, make)
