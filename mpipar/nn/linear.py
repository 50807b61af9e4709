"""The affine map y = x W^T + b."""

from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError, explain
from mpipar.nn import init
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec


class Linear(Module):
    """y = x W^T + b with weight [out_features, in_features], as in PyTorch.

    std=None draws weight and bias uniformly from +-1/sqrt(in_features), PyTorch's default; std
    given draws a normal weight and a zero bias.

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
        """Make the parameters f"{name}.weight" and f"{name}.bias"; ConfigError if a size is < 1."""
        check_size("in_features", in_features)
        check_size("out_features", out_features)
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


def check_size(name: str, value: int) -> None:
    """Raise ConfigError unless a layer's size is at least 1."""
    if value < 1:
        raise ConfigError(explain(name, value, "a size must be at least 1", "Choose a larger one"))


def join(prefix: str, name: str) -> str:
    """Return the global name of a layer's parameter."""
    return f"{prefix}.{name}" if prefix else name


def is_named(name: str) -> bool:
    """Say whether a parameter's global name is its own: those of unnamed layers are all alike."""
    return name not in ("", "weight", "bias")
