"""Optimisers that update local blocks in place, and the learning-rate schedule."""

from mpipar.optim.adam import Adam as Adam
from mpipar.optim.adam import AdamW as AdamW
from mpipar.optim.optimizer import Optimizer as Optimizer
from mpipar.optim.schedule import cosine as cosine
from mpipar.optim.sgd import SGD as SGD
