"""Dropout whose mask is a function of what is dropped, not of who computes it.

An element is dropped by (seed, name, training step, global row, global position, feature), so any
split of batch or sequence over ranks drops the same elements.  The step and the global row of
local row 0 come from `rng.at`, which a training loop enters; without it calls are counted.
Srivastava et al., JMLR 2014; survivors are scaled by 1 / (1 - p).
"""

import numpy as np

from mpipar import rng
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.autograd.fused import check_probability
from mpipar.errors import BufferMismatchError, explain
from mpipar.nn import init
from mpipar.nn.module import Module

ROW_BITS = 40  # of the 64 bits of an index: positions times features; the rest number the rows


class Dropout(Module):
    """Zero elements with probability p while training; does nothing in eval() or for p = 0.

    Every call drops other elements: calls in this process are numbered.  Such masks repeat when a
    program starts again, and depend on how the work is cut: data-parallel ranks that make the same
    calls drop the same places of their different rows.  In a block

        with rng.at(step, row):     # row: which row of the whole batch this rank's first one is
            loss = ...

    an element's fate depends on step, global row, position and feature only, whatever the layout:
    different ranks draw different masks, those that one process with the whole batch would draw,
    and so does a run that is resumed.  There, two layers of one stated seed need two names, or drop
    the same elements; what seed=None means, Linear says.
    """

    def __init__(self, p: float = 0.5, *, seed: int | None = None, name: str = "") -> None:
        """Raise ConfigError unless 0 <= p < 1."""
        check_probability(p)
        self.p = p
        self.seed = init.seed_of(seed, name, "dropout")
        self.name = name

    def forward(self, x: Tensor, positions: np.ndarray | None = None) -> Tensor:
        """Drop elements of x (rows, ..., features).

        positions: the global positions of dimension 1, (S,) or (rows, S), where a rank holds only
        some of a sequence; None counts the elements of a row from 0.
        """
        if self.p == 0.0 or not self.training:
            return x
        if not x.ndim:
            rule = "x must have a dimension of rows"
            raise BufferMismatchError(explain("x.shape", x.shape, rule, "Reshape it to (1,)"))
        key = rng.key(self.seed, self.name, "dropout", *rng.moment())
        return F.dropout(x, self.p, key, row_index(x.shape, rng.position().row, positions))

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


def row_index(shape: tuple[int, ...], row: int, positions: np.ndarray | None = None) -> np.ndarray:
    """Return a uint64 index for every element of an array whose first row is global row `row`."""
    inner = rng.indices(shape[1:], (0,) * len(shape[1:]), shape[1:])  # (...)
    if positions is not None:
        within = rng.indices(shape[2:], (0,) * len(shape[2:]), shape[2:])  # (features,)
        stride = np.uint64(np.prod(shape[2:], dtype=np.int64))
        starts = np.asarray(positions).astype(np.uint64) * stride  # (S,) or (rows, S)
        inner = starts.reshape(starts.shape + (1,) * within.ndim) + within
    rows = (np.arange(row, row + shape[0], dtype=np.uint64)) << np.uint64(ROW_BITS)
    return rows.reshape((-1,) + (1,) * (len(shape) - 1)) + inner
