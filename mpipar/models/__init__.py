"""The model families, and `build`, which makes one from its config."""

from mpipar.models.build import build as build
from mpipar.models.config import ModelConfig as ModelConfig
from mpipar.models.generate import generate as generate
from mpipar.models.transformer import Transformer as Transformer
