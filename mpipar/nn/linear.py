"""The affine map y = x W^T + b."""

from math import inf
from numbers import Real
from typing import Any

import numpy as np

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.nn import init
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec


class Linear(Module):
    """y = x W^T + b with weight [out_features, in_features], as in PyTorch.

    std=None draws weight and bias uniformly from +-1/sqrt(in_features), PyTorch's default; std
    given draws a normal weight and a zero bias.

    dtype is that of the parameters.  The result has the wider of it and x's (NumPy's promotion): a
    float64 x, NumPy's default, makes float64 of all that follows.  float16 does not go with
    bfloat16.

    The numbers depend on (seed, name) only: two layers of one stated seed need two names, or get
    equal weights.  seed=None is 0 for a layer with a name; one without gets a seed of its own by a
    counter of the process, equal on all ranks that build the same layers in the same order.
    """

    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        seed: int | None = None,
        name: str = "",
        std: float | None = None,
        dtype: str = "float32",
    ) -> None:
        """Make the parameters f"{name}.weight" and f"{name}.bias".

        Raises ConfigError for a size that is no integer of at least 1, or a std that is negative or
        not finite.
        """
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        if std is not None:
            check_scale("std", std)
        self.in_features, self.out_features = in_features, out_features
        seed = init.seed_of(seed, name)
        weight = Spec.replicated(join(name, "weight"), (out_features, in_features))
        bound = in_features**-0.5 if std is None else None
        self.weight = Parameter(init.draw(weight, seed, std, bound, dtype), weight)
        self.bias = None
        if bias:
            spec = Spec.replicated(join(name, "bias"), (out_features,))
            zero = 0.0 if std is not None else None
            self.bias = Parameter(init.draw(spec, seed, zero, bound, dtype), spec)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


def check_size(name: str, value: Any) -> None:
    """Raise ConfigError unless a layer's size is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        rule = "a size must be an integer, at least 1"
        raise ConfigError(explain(name, value, rule, "Choose such a number"))


def check_scale(name: str, value: Any) -> None:
    """Raise ConfigError unless an eps or a standard deviation is a finite number, not negative."""
    if not isinstance(value, Real) or not 0 <= float(value) < inf:
        rule = "it must be a finite number, and not negative"
        raise ConfigError(explain(name, value, rule, "Choose such a number"))


def check_full(name: str, whole: Any, ndim: int) -> None:
    """Raise BufferMismatchError unless a dense parameter is an array of `ndim` dimensions."""
    if getattr(whole, "ndim", None) != ndim or not hasattr(whole, "dtype"):
        given = tuple(whole.shape) if hasattr(whole, "shape") else type(whole).__name__
        rule = f"it must be an array of {ndim} dimensions"
        raise BufferMismatchError(explain(name, given, rule, "Pass the dense layer's"))


def join(prefix: str, name: str) -> str:
    """Return the global name of a layer's parameter."""
    return f"{prefix}.{name}" if prefix else name


def is_named(name: str) -> bool:
    """Say whether a parameter's global name is its own: those of unnamed layers are all alike."""
    return name not in ("", "weight", "bias")
