"""A run that begins with weights of a folder: `--init`.

The folder says which model is trained; flags that say otherwise are a mistake.  Sequences may be
shorter than those the model knows: of learned positions the first ones are taken.
"""

from dataclasses import replace
from typing import Any

from mpipar.errors import ConfigError, MpiparError, explain
from mpipar.huggingface.initial import load_weights, model_of
from mpipar.huggingface.text import Text, has_tokenizer, text_of
from mpipar.parallel.mesh import Mesh
from mpipar.train.agree import mark
from mpipar.train.config import TrainConfig
from mpipar.train.held import Held

SIZES = (
    *("model", "layers", "dim", "heads", "kv_heads", "hidden", "vocab", "tied"),
    *("rotary_base", "norm_eps", "experts", "top_k", "shared"),
)


def adopted(config: TrainConfig) -> TrainConfig:
    """Return the settings with the model of the folder that the run begins with, if there is one.

    Raises ConfigError for a flag that says otherwise, and for sequences that are too long.
    """
    if config.init is None:
        return config
    size, usual = model_of(config.init), TrainConfig()
    found: dict[str, Any] = {name: getattr(size, name) for name in SIZES}
    if not size.experts:
        found["top_k"] = None
    for name, theirs in found.items():
        own = getattr(config, name)
        if own not in (getattr(usual, name), theirs):
            rule = f"the weights of {config.init} are of a model with {theirs!r}"
            raise ConfigError(explain(name, own, rule, "Leave the flag out"))
    if config.seq > size.seq and size.model == "gpt2":
        rule = f"the model of {config.init} knows {size.seq} positions"
        raise ConfigError(explain("seq", config.seq, rule, f"Pass --seq {size.seq} or less"))
    return replace(config, **found)


def tokenizer(config: TrainConfig) -> Text | None:
    """Return what makes tokens of text, if the folder has it; ConfigError if it cannot be read."""
    if config.init is None or not has_tokenizer(config.init):
        return None
    return text_of(config.init, config.vocab)


def begin(held: Held, config: TrainConfig, mesh: Mesh) -> None:
    """Collective: load the weights that the run begins with, if it does not go on with others.

    Raises, on every rank, ConfigError or CheckpointError if that cannot be.
    """
    if config.init is None or config.resume is not None:
        return
    try:
        load_weights(config.init, held.saved, mesh)
    except MpiparError as error:  # all ranks have it
        raise mark(error) from None
