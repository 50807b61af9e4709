"""Kernels on the stand-in's arrays: the CPU's, on the same memory, noted as the stream's work."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tests.fake_cupy.arrays import _arrays, _lifted, ndarray, used

OPERATIONS = (
    *("adamw", "attention", "cross_entropy", "cross_entropy_cut", "dropout", "embedding", "gelu"),
    *("layer_norm", "matmul", "merge", "permute", "reduce", "rms_norm", "rotary", "sgd", "silu"),
    "softmax",
)
# what they write to: arguments
IN_PLACE = {"adamw_step": slice(None), "sgd_step": slice(None), "merge": slice(None)}
IN_PLACE |= {"fold": slice(2, 3), "assign": slice(1)}
USERS = ("mpipar.optim.adam", "mpipar.optim.sgd", "mpipar.parallel.context.ring")
USERS += ("mpipar.comm.binding", "mpipar.comm.device_run")
USERS += ("mpipar.parallel.experts.operations", "mpipar.parallel.experts.routing")


def _opened(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x._host
    return type(x)(_opened(one) for one in x) if type(x) in (tuple, list) else x


def twin(cpu: Callable[..., Any], written: slice | None) -> Callable[..., Any]:
    """Return the function that takes either kind of array, but both in no call.

    written: the arguments that it writes to; None: it makes new arrays.
    """

    def run(*arguments: Any, **how: Any) -> Any:
        given = _arrays((*arguments, *how.values()))
        if not given:
            return cpu(*arguments, **how)
        for x in (*arguments, *how.values()):
            if isinstance(x, np.ndarray) and x.ndim:
                raise TypeError(f"{cpu.__name__} of host and device arrays")
        used(given, [] if written is None else _arrays(arguments[written]))
        made = cpu(*_opened(arguments), **{k: _opened(v) for k, v in how.items()})
        made = _lifted(made)
        used([], _arrays(made) if written is None else [])
        return made

    return run


def install(monkeypatch: Any) -> None:
    """Put twins in the place of the public kernels that refuse device arrays, or start CUDA."""
    made: dict[Any, Callable[..., Any]] = {}
    for operation in OPERATIONS:
        module = importlib.import_module(f"mpipar.kernels.{operation}")
        for name, value in _public(module):
            made[value] = twin(value, IN_PLACE.get(name))
            monkeypatch.setattr(module, name, made[value])
    for path in USERS:
        user = importlib.import_module(path)
        for name, value in tuple(vars(user).items()):
            if callable(value) and getattr(value, "__hash__", None) and value in made:
                monkeypatch.setattr(user, name, made[value])


def _public(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    """Return the functions of a kernel's module that say where they run."""
    return [
        (name, value)
        for name, value in tuple(vars(module).items())
        if getattr(value, "__module__", "") == module.__name__
        and {"host", "is_device"} & set(getattr(getattr(value, "__code__", None), "co_names", ()))
    ]
