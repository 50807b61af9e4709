"""The model families, and `build`, which makes one from its config."""

from mpipar.models.build import build
from mpipar.models.config import ModelConfig
from mpipar.models.generate import generate
from mpipar.models.stages import layer_split, stages
from mpipar.models.transformer import Transformer

__all__ = ["ModelConfig", "Transformer", "build", "generate", "layer_split", "stages"]
