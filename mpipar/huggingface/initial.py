"""Weights that a run begins with: those of a Hugging Face folder, or of a checkpoint's model.

Every rank reads what it holds; nothing travels but small numbers.
"""

from pathlib import Path
from typing import Any

from mpipar import checkpoint
from mpipar.checkpoint.agree import together
from mpipar.checkpoint.entries import files_of
from mpipar.errors import CheckpointError
from mpipar.huggingface.convert import find
from mpipar.huggingface.settings import is_folder, read_settings
from mpipar.huggingface.weights import fill, parameters
from mpipar.models.config import ModelConfig
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.mesh import Mesh

POSITIONS = "position_embedding.weight"  # a model of shorter sequences takes the first rows


def model_of(folder: str | Path) -> ModelConfig:
    """Return the model whose weights a folder holds.

    Raises ConfigError or CheckpointError for a folder of neither kind.
    """
    path = Path(folder)
    if not is_folder(path):
        return find(path)[1]
    config = read_settings(path)
    parameters(config, path)  # its weights are there
    return config


def load_weights(folder: str | Path, model: Any, mesh: Mesh | Communicator) -> None:
    """Collective: fill this rank's part of a model, in its dtype, from a folder.

    model: a module, or what names all parameters that are here.  A checkpoint's dtype must be the
    model's.  Raises, on every rank, CheckpointError or ConfigError if that cannot be.
    """
    path = Path(folder)
    if not is_folder(path):
        checkpoint.load(path, {"model": model}, mesh)
        return
    comm = mesh.world if isinstance(mesh, Mesh) else mesh
    together(comm, lambda: _fill_all(path, model))


def _fill_all(folder: Path, model: Any) -> None:
    table = parameters(read_settings(folder), folder)
    for entry in files_of({"model": model})["model"]:
        if entry.name not in table:
            raise CheckpointError(f"{folder} has no {entry.name}: it is of another model")
        if entry.on_update is not None:
            entry.on_update()
        values = table[entry.name]
        if entry.name == POSITIONS:
            values = values.first(entry.spec.shape[0])
        fill(entry.array, entry.spec, values)
