"""The settings of a run that goes on: what is not given anew is that of the checkpoint.

    mpipar train --layers 8 --batch 64 --save run --steps 1000     ended by a signal at step 400
    mpipar train --resume run --save run                           8 layers, 64 sequences, to 1000
    mpipar train --resume run --save run --steps 2000 --pp 2       to 2000, on another mesh

The mesh, what is written and how it is computed are the command's alone.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mpipar.checkpoint import place
from mpipar.errors import CheckpointError, ConfigError, explain
from mpipar.train.config import TrainConfig

RUN = (
    *("data", "init", "batch", "steps", "lr", "min_lr", "warmup", "weight_decay", "clip"),
    *("balance", "capacity_factor"),
)
FREE = ("seed", "dropout")  # settings of a model that may be others when a run goes on


def kept(config: TrainConfig) -> dict[str, Any]:
    """Return what a checkpoint keeps of the settings of a run: those of its model, and RUN."""
    return {"model": asdict(config.model_config()), "run": {n: getattr(config, n) for n in RUN}}


def going_on(config: TrainConfig, read: Callable[[TrainConfig], TrainConfig]) -> TrainConfig:
    """Return the settings with those of the checkpoint that `config` goes on from, if it does.

    read: reads the command again, with these settings where it gives none.
    Raises ConfigError for a setting that makes another model than the checkpoint's.
    """
    if config.resume is None:
        return config
    model, run = _settings_of(Path(config.resume))
    config = read(replace(TrainConfig(), **model, **run))
    for name in model.keys() - {*FREE}:
        if getattr(config, name) != model[name]:
            rule = f"the checkpoint {config.resume} is of a model with {model[name]!r}"
            raise ConfigError(explain(name, getattr(config, name), rule, "Leave the flag out"))
    return config


def _settings_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of model and run; none if it has none, which who loads it explains."""
    try:
        state = json.loads(place.read_state(place.find(folder)))
        model, run = dict(state["model"]), dict(state.get("run", {}))
    except (CheckpointError, LookupError, TypeError, ValueError):
        return {}, {}
    if not model.get("experts"):
        model["top_k"] = None
    known = asdict(TrainConfig()).keys()
    return {n: model[n] for n in model.keys() & known}, {n: run[n] for n in run.keys() & {*RUN}}
