"""Keys and values of the tokens that a model has read, so that the next one costs one token's work.

    read 5 tokens    q0..q4 against k0..k4         kept: k0..k4, v0..v4
    read 1 more      q5     against k0..k5         kept: k0..k5, v0..v5

Keys are kept as attention takes them, turned by their positions.  Cost: 2 B S K D numbers a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpipar.arrays import module_of
from mpipar.autograd import Tensor
from mpipar.models.attention import SelfAttention
from mpipar.nn.module import Module


class KeysValues:
    """What one attention layer keeps: room for a number of tokens."""

    def __init__(self, room: int) -> None:
        self.room, self.used = room, 0
        self._kept: tuple[np.ndarray, np.ndarray] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keep k and v [B, S, K, D] of the next tokens; return all, and how many were before."""
        before, self.used = self.used, self.used + k.shape[1]
        if self._kept is None:
            batch, _, heads, dim = k.shape
            xp, shape = module_of(k.data), (batch, self.room, heads, dim)
            self._kept = xp.empty(shape, k.dtype), xp.empty(shape, v.dtype)
        for kept, new in zip(self._kept, (k, v), strict=True):
            kept[:, before : self.used] = new.data
        keys, values = (Tensor(kept[:, : self.used]) for kept in self._kept)
        return keys, values, before


@contextmanager
def remembering(model: Module, room: int) -> Iterator[list[KeysValues]]:
    """Let every attention layer of a model keep keys and values of `room` tokens.

    For layers that attend to whole sequences, without gradients; yields what they keep.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SelfAttention)]
    kept = [KeysValues(room) for _ in layers]
    try:
        for layer, own in zip(layers, kept, strict=True):
            layer.kept = own
        yield kept
    finally:
        for layer in layers:
            layer.kept = None
