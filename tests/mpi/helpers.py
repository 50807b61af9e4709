"""What several tests on all ranks share: numbers, and a small model to be sharded."""

from typing import Any

import numpy as np

import mpipar as mp
from mpipar.models.config import ModelConfig
from mpipar.partition import block

SIZES: dict[str, Any] = {"vocab": 37, "layers": 4, "dim": 16, "heads": 4, "seq": 8}
ROWS = 12  # sequences of a batch


def draw(*shape: int, seed: int = 3) -> np.ndarray:
    """Return normal numbers, the same on all ranks."""
    return np.random.default_rng(seed).standard_normal(shape)


def model(dtype: str = "float64", **make: Any) -> Any:
    """Return the small model."""
    return mp.models.build(ModelConfig(model="gpt2", dtype=dtype, **SIZES), **make)


def tokens(step: int = 0) -> np.ndarray:
    """Return the sequences of a step, of all ranks."""
    return np.random.default_rng(step).integers(0, 37, (ROWS, 9))


def backward(net: Any, comm: mp.Communicator, step: int = 0, scale: float = 1.0) -> float:
    """Leave the gradients of the mean over the batch; return this rank's loss."""
    rows = block(ROWS, comm.size, comm.rank)
    loss, count = net.loss(tokens(step)[rows, :-1], tokens(step)[rows, 1:])
    (loss * (scale / (ROWS * 8))).backward()
    return loss.item() / count


def full(strategy: str = "FULL_SHARD", **more: Any) -> mp.FsdpConfig:
    """Return settings under which some parameters are too small to be cut."""
    return mp.FsdpConfig(sharding_strategy=strategy, **{"min_param_size": 20, **more})
