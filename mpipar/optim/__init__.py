"""Optimisers that update local blocks in place, and the learning-rate schedule."""

from mpipar.optim.adam import Adam, AdamW
from mpipar.optim.optimizer import Optimizer
from mpipar.optim.schedule import cosine
from mpipar.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "cosine"]
