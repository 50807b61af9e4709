"""Which tensors of a Hugging Face folder make a parameter, and the other way round.

    GPT-2   transformer.h.0.attn.c_attn.weight (C, 3C)   its transpose is    ...attention.qkv.weight
    Llama   model.layers.0.self_attn.{q,k,v}_proj.weight one below the other ...attention.qkv.weight
            model.layers.0.mlp.{gate,up}_proj.weight     likewise            ...mlp.gate_up.weight

All else is only renamed: both turn pairs (i, i + D/2) by rotary positions, and both store weights
[out, in], but for GPT-2's, which are [in, out].
"""

from dataclasses import dataclass

from mpipar.models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """The tensors of which a parameter is made: concatenated along dim 0, or one transposed.

    shapes: of each tensor, as it lies in the folder.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool = False


def _one(name: str, *shape: int, transposed: bool = False) -> Source:
    return Source((name,), (shape,), transposed)


def sources(config: ModelConfig) -> dict[str, Source]:
    """Return where every parameter of a model comes from, by its global name."""
    return _gpt2(config) if config.model == "gpt2" else _llama(config)


def _gpt2(config: ModelConfig) -> dict[str, Source]:
    dim, hidden = config.dim, config.hidden
    table = {
        "token_embedding.weight": _one("transformer.wte.weight", config.vocab, dim),
        "position_embedding.weight": _one("transformer.wpe.weight", config.seq, dim),
    }
    norms = {"norm1": "ln_1", "norm2": "ln_2"}
    matrices = {
        "attention.qkv": ("attn.c_attn", dim, 3 * dim),
        "attention.projection": ("attn.c_proj", dim, dim),
        "mlp.up": ("mlp.c_fc", dim, hidden),
        "mlp.down": ("mlp.c_proj", hidden, dim),
    }
    for layer in range(config.layers):
        own, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        for name, other in norms.items():
            for part in ("weight", "bias"):
                table[f"{own}.{name}.{part}"] = _one(f"{theirs}.{other}.{part}", dim)
        for name, (other, wide, high) in matrices.items():
            weight = _one(f"{theirs}.{other}.weight", wide, high, transposed=True)
            table[f"{own}.{name}.weight"] = weight
            table[f"{own}.{name}.bias"] = _one(f"{theirs}.{other}.bias", high)
    for part in ("weight", "bias"):
        table[f"norm.{part}"] = _one(f"transformer.ln_f.{part}", dim)
    if not config.tied:
        table["head.weight"] = _one("lm_head.weight", config.vocab, dim)
    return table


def _llama(config: ModelConfig) -> dict[str, Source]:
    dim, hidden, keys = config.dim, config.hidden, config.kv_heads * config.head_dim
    fused = {
        "attention.qkv": ("self_attn", "qkv", (dim, keys, keys)),
        "mlp.gate_up": ("mlp", ("gate", "up"), (hidden, hidden)),
    }
    single = {
        "norm1": ("input_layernorm", (dim,)),
        "norm2": ("post_attention_layernorm", (dim,)),
        "attention.projection": ("self_attn.o_proj", (dim, dim)),
        "mlp.down": ("mlp.down_proj", (dim, hidden)),
    }
    table = {"token_embedding.weight": _one("model.embed_tokens.weight", config.vocab, dim)}
    for layer in range(config.layers):
        own, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, (half, parts, rows) in fused.items():
            names = tuple(f"{theirs}.{half}.{part}_proj.weight" for part in parts)
            table[f"{own}.{name}.weight"] = Source(names, tuple((row, dim) for row in rows))
        for name, (other, shape) in single.items():
            table[f"{own}.{name}.weight"] = _one(f"{theirs}.{other}.weight", *shape)
    table["norm.weight"] = _one("model.norm.weight", dim)
    if not config.tied:
        table["head.weight"] = _one("lm_head.weight", config.vocab, dim)
    return table
