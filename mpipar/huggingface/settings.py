"""config.json of a Hugging Face folder, as a ModelConfig and back.

What changes the numbers and is not known here is refused, never passed over: another activation,
scaled rotary positions, biases in Llama's layers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig

CONFIG = "config.json"
TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of the same formula
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def is_folder(folder: str | Path) -> bool:
    """Say whether a folder is one of Hugging Face's."""
    return (Path(folder) / CONFIG).is_file()


def read_settings(folder: Path) -> ModelConfig:
    """Return the model of a folder; raises ConfigError for one that cannot be built here."""
    path = folder / CONFIG
    try:
        told = json.loads(path.read_text())
        kind = told["model_type"]
    except OSError as error:
        rule = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(explain("folder", str(folder), rule, "Pass a model's folder")) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_model(folder, error) from error
    if kind not in tuple(ARCHITECTURES):
        rule = f"models of {', '.join(ARCHITECTURES)} can be built"
        raise ConfigError(explain(f"model_type in {path}", kind, rule, "Choose another model"))
    try:
        config, limits = (_gpt2 if kind == "gpt2" else _llama)(told)
    except KeyError as error:
        rule = f"{CONFIG} says nothing of {error}"
        raise ConfigError(explain("folder", str(folder), rule, "Download it again")) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _no_model(folder, error) from error
    for name, value, good in limits:
        if value not in good:
            words = " or ".join(map(repr, good))
            rule = f"a {kind} model here has {words}"
            fix = "The numbers would be others; choose another model"
            raise ConfigError(explain(f"{name} in {path}", value, rule, fix))
    return config


def _no_model(folder: Path, error: Exception) -> ConfigError:
    rule = f"{CONFIG} is no description of a model: {error!r}"
    return ConfigError(explain("folder", str(folder), rule, "Download it again"))


Limit = tuple[str, Any, tuple[Any, ...]]  # a setting, its value, those that mean what is built


def _gpt2(told: dict[str, Any]) -> tuple[ModelConfig, Iterator[Limit]]:
    config = ModelConfig(
        model="gpt2", vocab=told["vocab_size"], layers=told["n_layer"], dim=told["n_embd"],
        heads=told["n_head"], seq=told["n_positions"], hidden=told.get("n_inner") or 0,
        tied=told.get("tie_word_embeddings", True), norm_eps=told.get("layer_norm_epsilon", 1e-5),
        dtype=_dtype(told),
    )  # fmt: skip

    def limits() -> Iterator[Limit]:
        yield "activation_function", told.get("activation_function", "gelu_new"), TANH
        yield "scale_attn_weights", told.get("scale_attn_weights", True), (True,)
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            yield name, told.get(name, False), (False,)
        yield from _common(told)

    return config, limits()


def _llama(told: dict[str, Any]) -> tuple[ModelConfig, Iterator[Limit]]:
    turns = told.get("rope_parameters") or {}
    scaling = told.get("rope_scaling") or {}
    config = ModelConfig(
        model="llama", vocab=told["vocab_size"], layers=told["num_hidden_layers"],
        dim=told["hidden_size"], heads=told["num_attention_heads"],
        kv_heads=told.get("num_key_value_heads") or 0, hidden=told["intermediate_size"],
        seq=told["max_position_embeddings"], tied=told.get("tie_word_embeddings", False),
        norm_eps=told.get("rms_norm_eps", 1e-6),
        rotary_base=float(turns.get("rope_theta") or told.get("rope_theta") or 10000.0),
        dtype=_dtype(told),
    )  # fmt: skip

    def limits() -> Iterator[Limit]:
        yield "hidden_act", told.get("hidden_act", "silu"), ("silu",)
        yield "head_dim", told.get("head_dim") or config.head_dim, (config.head_dim,)
        kind = turns.get("rope_type") or scaling.get("rope_type") or scaling.get("type")
        yield "rope_type", kind or "default", ("default",)
        yield "partial_rotary_factor", told.get("partial_rotary_factor") or 1, (1,)
        for name in ("attention_bias", "mlp_bias"):
            yield name, told.get(name, False), (False,)
        yield from _common(told)

    return config, limits()


def _common(told: dict[str, Any]) -> Iterator[Limit]:
    yield "tie_word_embeddings", told.get("tie_word_embeddings"), (True, False, None)
    yield "quantization_config", told.get("quantization_config"), (None,)


def _dtype(told: dict[str, Any]) -> str:
    name = told.get("dtype") or told.get("torch_dtype") or "float32"
    return str(name)


def write_settings(config: ModelConfig) -> str:
    """Return the text of config.json for a model; raises ConfigError for one with experts."""
    if config.experts:
        rule = "transformers has no such model of experts"
        raise ConfigError(explain("experts", config.experts, rule, "Convert a model without"))
    common: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model]], "model_type": config.model,
        "dtype": config.dtype, "torch_dtype": config.dtype, "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    own = {
        "gpt2": {
            "n_layer": config.layers, "n_embd": config.dim, "n_head": config.heads,
            "n_positions": config.seq, "n_inner": config.hidden,
            "layer_norm_epsilon": config.norm_eps, "activation_function": "gelu_new",
        },
        "llama": {
            "num_hidden_layers": config.layers, "hidden_size": config.dim,
            "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim, "intermediate_size": config.hidden,
            "max_position_embeddings": config.seq, "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rotary_base, "hidden_act": "silu",
            "rope_parameters": {"rope_theta": config.rotary_base, "rope_type": "default"},
        },
    }  # fmt: skip
    return json.dumps({**common, **own[config.model]}, indent=2) + "\n"
