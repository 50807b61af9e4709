"""Run a module as a function of its parameters, which is what gradcheck needs."""

import contextlib

from mpipar.nn import Module, Parameter


@contextlib.contextmanager
def substitute(module: Module, tensors):
    """Put Tensors in the places of module.parameters(), in their order, for the block."""
    new = {id(p): t for p, t in zip(module.parameters(), tensors, strict=True)}
    places = [
        (owner, name, value)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, Parameter)
    ]
    for owner, name, value in places:
        setattr(owner, name, new[id(value)])
    try:
        yield
    finally:
        for owner, name, value in places:
            setattr(owner, name, value)
