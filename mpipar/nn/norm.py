"""Layer normalisation and its form without mean and bias.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     Ba et al., 2016
    RMSNorm     y = x / sqrt(mean(x^2) + eps) * weight                     Zhang and Sennrich, 2019

Both over the last dimension, starting as weight 1 and bias 0.
"""

import numpy as np

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.nn.init import float_dtype
from mpipar.nn.linear import check_scale, check_size, join
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec


class LayerNorm(Module):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift."""

    def __init__(
        self, dim: int, eps: float = 1e-5, *, name: str = "", dtype: str = "float32"
    ) -> None:
        """Make f"{name}.weight" and f"{name}.bias", (dim,); ConfigError if dim < 1, eps < 0."""
        check_size("dim", dim)
        check_scale("eps", eps)
        self.eps = eps
        self.weight = _vector(1.0, dim, join(name, "weight"), dtype)
        self.bias = _vector(0.0, dim, join(name, "bias"), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim)."""
        return F.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{self.weight.spec.shape[0]}, eps={self.eps}"


class RMSNorm(Module):
    """Divide the last dimension by its root mean square, then scale."""

    def __init__(
        self, dim: int, eps: float = 1e-5, *, name: str = "", dtype: str = "float32"
    ) -> None:
        """Make f"{name}.weight", (dim,); ConfigError if dim < 1, eps < 0."""
        check_size("dim", dim)
        check_scale("eps", eps)
        self.eps = eps
        self.weight = _vector(1.0, dim, join(name, "weight"), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., dim)."""
        return F.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the size."""
        return f"{self.weight.spec.shape[0]}, eps={self.eps}"


def _vector(value: float, dim: int, name: str, dtype: str) -> Parameter:
    return Parameter(np.full(dim, value, float_dtype(dtype)), Spec.replicated(name, (dim,)))
