"""`mpipar generate`: let a model go on with a text.

    mpipar generate --checkpoint runs/gpt --prompt "def " --tokens 200
    mpiexec -n 2 mpipar generate --checkpoint gpt2/ --prompt "Once" --temperature 0

Every rank of the job holds a part of each layer (tensor parallel); they write the same, rank 0
shows it.  Keys and values of the tokens so far are kept.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from tyro.conf import arg

from mpipar.cli.train import HEAD_START, fail
from mpipar.errors import ConfigError, MpiparError, explain

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpipar.huggingface.text import Text
    from mpipar.models.config import ModelConfig

ALONE = ()


@dataclass(frozen=True)
class Config:
    """Write what a model predicts after a text, token by token."""

    checkpoint: Annotated[Path, arg(metavar="FOLDER")]
    """A checkpoint, a folder of them, of which it is the newest, or a Hugging Face folder."""
    prompt: str = "\n"
    """The text to go on with. It becomes tokens by the folder's tokenizer.json, if there is one,
    and else by bytes, if the model has a vocabulary of 256."""
    prompt_tokens: Annotated[tuple[int, ...], arg(metavar="INT")] = ()
    """Tokens to go on with instead of a text; tokens are shown then."""
    tokens: int = 200
    """How many to write."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 draws from the model's distribution."""
    seed: int = 0
    """Of the draws."""


def run(config: Config) -> int:
    """Collective: generate on all ranks; return the exit code, the same on every rank."""
    from mpipar.train import launch

    if trouble := launch.start():
        return fail(trouble, launch.first_of_job(), lambda: time.sleep(HEAD_START))
    from mpi4py import MPI

    from mpipar.train.agree import is_of_all_ranks

    world = MPI.COMM_WORLD
    try:
        written = generate(config, world)
    except MpiparError as error:
        if not is_of_all_ranks(error):
            raise
        return fail(str(error), world.rank == 0, world.Barrier)
    if world.rank == 0:
        print(written)
    return 0


def generate(config: Config, world: "MPI.Intracomm") -> str:
    """Collective: return the prompt and what follows, as text or as tokens.

    Raises, marked, what all ranks raise together: ConfigError or CheckpointError.
    """
    from mpipar import models, partition
    from mpipar.huggingface.initial import load_weights, model_of
    from mpipar.parallel.inject import factories
    from mpipar.parallel.mesh import Mesh
    from mpipar.train.agree import mark, same, together

    same(world, "the configuration", repr(config), "Start all ranks with the same flags.")
    together(world, lambda: _check(config))
    size = together(world, lambda: _checked(model_of(config.checkpoint), world.size))
    text, prompt = together(world, lambda: _prompt(config, size))
    with Mesh(world, tp=world.size) as mesh:
        try:
            made: dict[str, Any] = factories(mesh)
            model = models.build(size, **made)
            load_weights(config.checkpoint, model, mesh)
            gather = partial(mesh.tp.all_gather, sizes=partition.blocks(size.vocab, mesh.tp.size))
            how: dict[str, Any] = {"seed": config.seed, "temperature": config.temperature}
            new = models.generate(model, prompt, config.tokens, gather=gather, cached=True, **how)
        except MpiparError as error:  # all ranks have it
            raise mark(error) from None
    whole = np.concatenate([prompt, new])
    return " ".join(map(str, whole)) if text is None else text.decode(whole)


def _check(config: Config) -> None:
    """Raise ConfigError for what no model can do, before one is read."""
    if config.tokens < 0:
        raise ConfigError(explain("tokens", config.tokens, "it must be >= 0", "Say --tokens 200"))
    if not config.temperature >= 0:
        rule = "it must be >= 0"
        raise ConfigError(explain("temperature", config.temperature, rule, "Say --temperature 1"))


def _checked(size: "ModelConfig", ranks: int) -> "ModelConfig":
    """Return the model's sizes; raises ConfigError if it cannot be cut over so many ranks."""
    if size.experts:
        rule = "models with experts are not generated from here"
        raise ConfigError(explain("experts", size.experts, rule, "See the sample of mpipar train"))
    for name in ("heads", "kv_heads", "hidden"):
        if getattr(size, name) % ranks:
            rule = f"{ranks} ranks must divide it"
            fix = "Start as many ranks as divide heads, kv_heads and hidden"
            raise ConfigError(explain(name, getattr(size, name), rule, fix))
    return size


def _prompt(config: Config, size: "ModelConfig") -> tuple["Text | None", np.ndarray]:
    """Return how to show tokens, None for their numbers, and those of the prompt."""
    from mpipar.huggingface.text import text_of

    if config.prompt_tokens:
        return None, np.asarray(config.prompt_tokens, np.int64)
    text = text_of(config.checkpoint, size.vocab)
    return text, text.encode(config.prompt)
