"""A table looked up by token id; the same table gives the logits of a tied output layer."""

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.autograd.record import array
from mpipar.errors import ConfigError, explain
from mpipar.nn import init
from mpipar.nn.linear import check_scale, check_size, join
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec


class Embedding(Module):
    """Rows of weight [num, dim], drawn from a normal distribution with standard deviation std.

    seed and name decide the numbers, and what seed=None means, as for Linear.
    """

    def __init__(
        self,
        num: int,
        dim: int,
        *,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        dtype: str = "float32",
    ) -> None:
        """Make the parameter f"{name}.weight"; raises ConfigError if a size is < 1."""
        check_size("num", num)
        check_size("dim", dim)
        check_scale("std", std)
        self.num, self.dim = num, dim
        spec = Spec.replicated(join(name, "weight"), (num, dim))
        self.weight = Parameter(init.draw(spec, init.seed_of(seed, name), std, dtype=dtype), spec)

    def forward(self, ids: Array) -> Tensor:
        """Return the rows of ids (...): (..., dim).  Raises ConfigError for an id not in it."""
        ids = array(ids)
        check_ids("ids", ids, self.num)
        return F.embedding(ids, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Return x W^T: x (..., dim) to (..., num)."""
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"num={self.num}, dim={self.dim}"


def check_ids(what: str, ids: Array, num: int, ignore_index: int | None = None) -> None:
    """Raise ConfigError naming the first id outside 0..num-1, where it stands, and num.

    ignore_index: an id outside that range which is allowed (masked targets).
    """
    if ids.dtype.kind not in "iu":
        rule = "ids of tokens must be integers"
        raise ConfigError(explain(f"{what}.dtype", ids.dtype.name, rule, "Convert them"))
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < num):
        return
    bad = (ids < 0) | (ids >= num)
    if ignore_index is not None:
        bad &= ids != ignore_index
    if bad.any():
        first = int(module_of(ids).argmax(bad.ravel()))
        at = ", ".join(str(i) for i in np.unravel_index(first, ids.shape))
        rule = f"it must be in the vocabulary of {num} (0..{num - 1})"
        fix = "Use the tokenizer of the data, or a larger vocabulary"
        raise ConfigError(explain(f"{what}[{at}]", int(ids.ravel()[first]), rule, fix))
