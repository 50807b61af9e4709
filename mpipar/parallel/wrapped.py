"""What DataParallel and FSDP have in common: they look like their module, and check what they get.

The checks are of a communicator and a module, before a message is sent: on every rank alike.
"""

from typing import Any, Self

from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Module
from mpipar.parallel.communicator import Communicator


class Wrapper:
    """A class that has the names of the `module` it keeps, besides its own."""

    module: Any

    def __getattr__(self, name: str) -> Any:
        """Return what the module has under this name."""
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __dir__(self) -> list[str]:
        """Return the names of this class and of the module."""
        return sorted({*super().__dir__(), *dir(self.module)})

    def train(self, mode: bool = True) -> Self:
        """Set `training` in the module; returns self."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Unset `training` in the module; returns self."""
        return self.train(False)


def require_communicator(
    comm: Any, name: str = "comm", fix: str = "Pass mesh.dp, or mp.Communicator(MPI.COMM_WORLD)"
) -> None:
    """Raise ConfigError for what is no Communicator: one of mpi4py, say."""
    if not isinstance(comm, Communicator):
        raise ConfigError(
            explain(name, type(comm).__name__, "it must be a Communicator of mpipar", fix)
        )


def require_unwrapped(module: Any, by: str) -> None:
    """Raise ConfigError for what is no module, or one whose gradients are reduced already.

    by: the class that is to reduce them.  Those that do so have `reduces_gradients` set; a module
    that one has put hooks into has a `forward` with its name as `of`.
    """
    if not isinstance(module, Module) and not _reduces(module):
        rule, fix = "it must be a mp.nn.Module", "Pass the model"
        raise ConfigError(explain("module", type(module).__name__, rule, fix))
    inner = _inside(module)
    if inner is None:
        return
    whole = _reduces(module)
    rule = "gradients are reduced once, so DataParallel and FSDP are not nested"
    fix = "Pass its .module, or leave one of the two out" if whole else "destroy() the other first"
    raise ConfigError(explain("module", f"{by}({inner}(...))", rule, fix))


def _reduces(x: Any) -> bool:
    return bool(getattr(type(x), "reduces_gradients", False))


def _inside(module: Any) -> str | None:
    """Return the name of what reduces gradients of this module or one below it, if there is."""
    if _reduces(module):
        return type(module).__name__
    for child in module.modules():
        of = getattr(vars(child).get("forward"), "of", None)
        if of is not None:
            return str(of)
        for value in vars(child).values():
            if _reduces(value):
                return type(value).__name__
    return None
