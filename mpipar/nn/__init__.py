"""Layers, parameters, and the description of where a parameter's block lies."""

from mpipar.nn.dropout import Dropout as Dropout
from mpipar.nn.embedding import Embedding as Embedding
from mpipar.nn.linear import Linear as Linear
from mpipar.nn.module import Module as Module
from mpipar.nn.module import Parameter as Parameter
from mpipar.nn.norm import LayerNorm as LayerNorm
from mpipar.nn.norm import RMSNorm as RMSNorm
from mpipar.nn.spec import Partial as Partial
from mpipar.nn.spec import Replicate as Replicate
from mpipar.nn.spec import Shard as Shard
from mpipar.nn.spec import Spec as Spec
