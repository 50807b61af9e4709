"""`mpipar convert`: a Hugging Face folder of weights to a checkpoint of mpipar, or back.

    mpipar convert gpt2/ runs/gpt2        config.json and *.safetensors to a checkpoint
    mpipar convert runs/gpt2 exported/    a checkpoint to a folder that transformers reads

Which way is seen from SOURCE.  One process does it, with memory for the model once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from mpipar.cli.schedule import byte_count
from mpipar.errors import ConfigError, explain

Folder = Annotated[Positional[Path], arg(metavar="FOLDER")]


@dataclass(frozen=True)
class Config:
    """Convert a Hugging Face folder of GPT-2 or Llama to a checkpoint, or a checkpoint to one."""

    source: Folder
    """A folder with config.json and *.safetensors, or a checkpoint, or a folder of checkpoints, of
    which it is the newest."""
    target: Folder
    """A new folder."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Of the checkpoint's weights; that of the source if not given."""
    max_file: Annotated[str, arg(metavar="BYTES")] = "5GB"
    """Largest file of a Hugging Face folder, such as 500MB; an index names the files if there are
    several."""


ALONE = (Config,)


def run(config: Config) -> int:
    """Convert, and say what was written; return the exit code."""
    from mpi4py import MPI

    from mpipar.huggingface.convert import from_checkpoint, to_checkpoint
    from mpipar.huggingface.settings import is_folder
    from mpipar.parallel.communicator import Communicator

    most = int(byte_count("max_file", config.max_file, least=1))
    with Communicator(MPI.COMM_SELF) as comm:
        if is_folder(config.source):
            made = to_checkpoint(config.source, config.target, comm, config.dtype)
        elif config.dtype is not None:
            rule = "it is for the way to a checkpoint"
            raise ConfigError(explain("dtype", config.dtype, rule, "Leave it out"))
        else:
            made = from_checkpoint(config.source, config.target, comm, most)
    print(f"wrote {made}")
    return 0
