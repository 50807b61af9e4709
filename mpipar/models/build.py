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
    """Return the model of a config, made of the layers that the other arguments return.

    None is what a model on one rank takes.  `mp.factories(mesh)` makes all of them for a mesh:

        model = models.build(config, **mp.factories(mesh, sequence_parallel=True))

    One's own have the forms of `mpipar.models.factories` (B sequences of S tokens, C features):

    linear(role, in, out, *, bias, seed, name, std, dtype, parts=None): a layer (B, S, in) ->
    (B, S, out); of role "column" it may return this rank's part of out, "row" takes such a part,
    "dense" neither; parts: the sizes in a fused out, each of which is cut on its own.
    embedding(num, dim, *, seed, name, std, dtype): a module from ids (B, S) to (B, S, dim), whose
    `logits(x)` are (B, S, num), or this rank's part of num.
    attention(q, k, v): causal, [B, S, heads, head_dim] of this rank's heads -> the shape of q.
    cross_entropy(logits, targets, reduction): of those logits; targets of -100 do not count.
    norm(kind, dim, *, eps, name, dtype): a layer (..., dim) -> (..., dim); kind: LayerNorm or
    RMSNorm.
    shard(x, dim): the part of x that lies between row and column layers; length(x): S of such a
    part.  Without sequence parallelism, x and x.shape[1].
    experts(dim, hidden, experts, k, *, activation, shared, seed, name, std, down_std, dtype): a
    layer ((B, S, C), positions) -> (B, S, C) in place of an MLP; needed where config.experts is
    above 0.
    recompute: between forward and backward keep only the inputs of every block, and run it again.

    The initial weights depend on config.seed and the layers' global names alone.

    Raises ConfigError for experts in the config that nothing makes.
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
