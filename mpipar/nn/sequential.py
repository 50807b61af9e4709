"""Modules one after the other."""

from collections.abc import Iterator
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Module


class Sequential(Module):
    """Each module takes what the one before it returned.

    Parameters are called as in PyTorch, by the module's number: `0.weight`, `2.bias`.
    """

    def __init__(self, *modules: Module) -> None:
        """Take the modules in order; raises ConfigError for something else."""
        for number, module in enumerate(modules):
            if not isinstance(module, Module):
                several = isinstance(module, list | tuple)
                fix = "Pass Sequential(*modules)" if several else "Make it a Module, like nn.ReLU()"
                what, kind = f"modules[{number}]", type(module).__name__
                raise ConfigError(explain(what, kind, "it must be a Module", fix))
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        """Return the output of the last module; x itself if there is none."""
        for module in self:
            x = module(x)
        return x

    def __len__(self) -> int:
        """Return how many modules there are."""
        return sum(name.isdigit() for name in vars(self))

    def __iter__(self) -> Iterator[Module]:
        """Iterate over the modules in order."""
        return iter([member for name, member in vars(self).items() if name.isdigit()])

    def __getitem__(self, index: int | slice) -> Module:
        """Return a module, or a Sequential of some of them, which are shared."""
        chosen = list(self)[index]
        return Sequential(*chosen) if isinstance(chosen, list) else chosen
