"""Elementwise functions as modules, for Sequential; each calls the function of its name."""

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.nn.module import Module


class ReLU(Module):
    """x where it is positive, else 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (...) to (...)."""
        return F.relu(x)


class GELU(Module):
    """The Gaussian error linear unit.

    approximate: "tanh", as in GPT-2 and `functional.gelu`; "none", PyTorch's default, is exact.
    """

    def __init__(self, approximate: str = "tanh") -> None:
        """Take the form to compute."""
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Map x (...) to (...); raises ConfigError for an `approximate` that there is not."""
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        """Return the form."""
        return f"approximate={self.approximate!r}"


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (...) to (...)."""
        return F.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (...) to (...)."""
        return F.sigmoid(x)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (...) to (...)."""
        return F.silu(x)
