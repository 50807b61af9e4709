"""A Hugging Face folder to a checkpoint of mpipar, and back.

Both need memory for the whole model once.  The new folder appears when it is complete.
"""

import json
import secrets
import shutil
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import numpy as np

from mpipar import checkpoint
from mpipar.arrays import dtype as dtype_of
from mpipar.checkpoint import place
from mpipar.checkpoint.format import parse
from mpipar.errors import CheckpointError
from mpipar.huggingface.names import sources
from mpipar.huggingface.settings import CONFIG, read_settings, write_settings
from mpipar.huggingface.weights import check, parameters, write_tensors
from mpipar.models.config import ModelConfig
from mpipar.parallel.communicator import Communicator

FILE = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def to_checkpoint(source: Path, target: Path, comm: Communicator, dtype: str | None = None) -> Path:
    """Collective: save the model of a Hugging Face folder as a checkpoint; return its folder.

    dtype: to convert to.  A tokenizer is copied along.  Raises, on every rank, ConfigError or
    CheckpointError for a folder that cannot be read or a target that cannot be written.
    """
    target = _new(target)
    config = read_settings(source)
    kind = dtype_of(dtype or config.dtype)
    arrays = {}
    for name, values in parameters(config, source).items():
        parts = values.parts
        one = parts[0] if len(parts) == 1 else np.concatenate(parts)
        arrays[name] = np.ascontiguousarray(one, kind)
    state = {"step": 0, "model": asdict(config) | {"dtype": kind.name}}
    saved = checkpoint.save(target, {"model": arrays, "state": state}, comm)
    if comm.rank == 0:
        copy_tokenizer(source, target)
    comm.barrier()
    return saved.folder


def from_checkpoint(source: Path, target: Path, comm: Communicator, most: int) -> Path:
    """Write the model of a checkpoint as a Hugging Face folder; return it.  One rank does it.

    most: bytes of a file.  Raises CheckpointError if there is no complete checkpoint of a model
    that `mpipar train` or `to_checkpoint` saved, or the target is not empty, and ConfigError for a
    model that transformers does not know.
    """
    target = _new(target)
    found, config = find(source)
    settings = write_settings(config)
    head = parse(place.read_head(found, FILE), str(found.folder / FILE))
    own = {one.name: np.empty(one.shape, one.dtype) for one in head.places}
    checkpoint.load(found.folder, {"model": own}, comm)
    tensors: dict[str, np.ndarray] = {}
    for name, of in sources(config).items():
        if name not in own:
            raise CheckpointError(f"{found.folder} has no {name}: it is of another model")
        cuts = list(accumulate(shape[0] for shape in of.shapes))[:-1]
        parts = [own[name].T] if of.transposed else np.split(own[name], cuts)
        for part, shape in zip(parts, of.shapes, strict=True):
            check(f"{name} in {found.folder}", part, shape)
        tensors |= dict(zip(of.names, parts, strict=True))
    hidden = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    try:
        hidden.mkdir(parents=True)
        write_tensors(hidden, tensors, most)
        (hidden / CONFIG).write_text(settings)
        copy_tokenizer(found.folder, hidden)
        if target.is_dir():
            target.rmdir()  # empty: a rename does not replace it everywhere
        hidden.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return target


def _new(target: Path) -> Path:
    """Return the folder to make; raises CheckpointError if something is there."""
    place_of = place.real(target)
    try:
        if place_of.exists() and (not place_of.is_dir() or any(place_of.iterdir())):
            raise CheckpointError(f"{target} is there, and holds something else: pass a new folder")
    except PermissionError as error:
        raise CheckpointError(f"{target} cannot be read: {error.strerror}") from error
    return place_of


def find(folder: Path) -> tuple[place.Found, ModelConfig]:
    """Return the newest complete checkpoint in a folder, and which model it is of.

    Raises CheckpointError if there is none, or its state does not say.
    """
    try:
        found = place.find(folder)
    except CheckpointError as error:
        if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*")):
            text = f"{folder} has weights, but no {CONFIG}: download that too"
            raise CheckpointError(text) from error
        raise
    try:
        return found, ModelConfig(**json.loads(place.read_state(found))["model"])
    except (KeyError, TypeError) as error:
        text = f"{found.folder} does not say which model it is of"
        raise CheckpointError(f"{text}: pass a checkpoint that mpipar train saved") from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, if there are any."""
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
