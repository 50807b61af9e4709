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

    rows: of each tensor, where there are several.
    """

    names: tuple[str, ...]
    transposed: bool = False
    rows: tuple[int, ...] = ()


def sources(config: ModelConfig) -> dict[str, Source]:
    """Return where every parameter of a model comes from, by its global name."""
    return _gpt2(config) if config.model == "gpt2" else _llama(config)


def _gpt2(config: ModelConfig) -> dict[str, Source]:
    table = {
        "token_embedding.weight": Source(("transformer.wte.weight",)),
        "position_embedding.weight": Source(("transformer.wpe.weight",)),
    }
    kinds = {"norm1": "ln_1", "norm2": "ln_2"}
    matrices = {
        "attention.qkv": "attn.c_attn", "attention.projection": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(config.layers):
        for own, theirs in (kinds | matrices).items():
            for part in ("weight", "bias"):
                name = f"transformer.h.{layer}.{theirs}.{part}"
                transposed = own in matrices and part == "weight"
                table[f"blocks.{layer}.{own}.{part}"] = Source((name,), transposed)
    for part in ("weight", "bias"):
        table[f"norm.{part}"] = Source((f"transformer.ln_f.{part}",))
    if not config.tied:
        table["head.weight"] = Source(("lm_head.weight",))
    return table


def _llama(config: ModelConfig) -> dict[str, Source]:
    keys = config.kv_heads * config.head_dim
    fused = {
        "attention.qkv": ("self_attn", "qkv", (config.dim, keys, keys)),
        "mlp.gate_up": ("mlp", ("gate", "up"), (config.hidden, config.hidden)),
    }
    single = {
        "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
        "attention.projection": "self_attn.o_proj", "mlp.down": "mlp.down_proj",
    }  # fmt: skip
    table = {"token_embedding.weight": Source(("model.embed_tokens.weight",))}
    for layer in range(config.layers):
        own, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, (half, parts, rows) in fused.items():
            names = tuple(f"{theirs}.{half}.{part}_proj.weight" for part in parts)
            table[f"{own}.{name}.weight"] = Source(names, rows=rows)
        for name, other in single.items():
            table[f"{own}.{name}.weight"] = Source((f"{theirs}.{other}.weight",))
    table["norm.weight"] = Source(("model.norm.weight",))
    if not config.tied:
        table["head.weight"] = Source(("lm_head.weight",))
    return table
