"""From a config to a model, with the layers of one's choice."""

from mpipar.models.config import ModelConfig
from mpipar.models.factories import (
    Attention,
    CrossEntropy,
    EmbeddingFactory,
    Factories,
    LinearFactory,
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
) -> Transformer:
    """Return the model of a config; a factory that is None makes dense layers.

    The initial weights depend on config.seed and the layers' global names alone.
    """
    dense = Factories()
    make = Factories(
        linear=linear or dense.linear,
        embedding=embedding or dense.embedding,
        attention=attention or dense.attention,
        cross_entropy=cross_entropy or dense.cross_entropy,
    )
    return FAMILIES[config.model](config, make)
