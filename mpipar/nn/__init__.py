"""Layers, parameters, and the description of where a parameter's block lies."""

from mpipar.nn.activation import GELU, ReLU, Sigmoid, SiLU, Tanh
from mpipar.nn.dropout import Dropout
from mpipar.nn.embedding import Embedding
from mpipar.nn.linear import Linear
from mpipar.nn.module import Module, Parameter
from mpipar.nn.norm import LayerNorm, RMSNorm
from mpipar.nn.sequential import Sequential
from mpipar.nn.spec import Partial, Replicate, Shard, Spec

__all__ = [
    "GELU",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "Partial",
    "RMSNorm",
    "ReLU",
    "Replicate",
    "Sequential",
    "Shard",
    "SiLU",
    "Sigmoid",
    "Spec",
    "Tanh",
]
