"""What all ranks do, or fail at, together.

rank 0: wrote its share    rank 1: no space left    ->    both raise "no space left (rank 1)"
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from mpipar import rng
from mpipar.comm.flight import describe_groups
from mpipar.errors import ConfigError, MismatchError, MpiparError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.agreement import exchange

T = TypeVar("T")


def world_of(mesh: Any) -> Communicator:
    """Return the communicator of all ranks of a mesh; raises ConfigError for something else."""
    comm = getattr(mesh, "world", mesh)
    if not isinstance(comm, Communicator):
        rule = "it must be a Mesh, or a Communicator of all ranks that hold a part"
        raise ConfigError(explain("mesh", type(mesh).__name__, rule, "Pass the mesh"))
    return comm


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Collective: run an action on every rank; if one fails, all raise the error of the lowest."""
    value: list[T] = []
    fault = None
    try:
        value.append(action())
    except MpiparError as error:
        fault = error
    exchange(comm, (), fault)
    return value[0]


def same(comm: Communicator, call: str, arguments: Mapping[str, object]) -> None:
    """Collective: raise MismatchError on every rank if one of them passed other arguments.

    It says which, and what every rank passed.
    """
    texts = {name: repr(value) for name, value in arguments.items()}
    table = exchange(comm, [rng.key(0, text) >> 1 for text in texts.values()])
    wrong = [name for name, keys in zip(texts, table.T, strict=True) if (keys != keys[0]).any()]
    if wrong:
        mine = ", ".join(f"{name}={texts[name]}" for name in wrong)
        each = describe_groups(dict(enumerate(comm.process_group.raw.allgather(mine))))
        raise MismatchError(f"the ranks call {call} with different arguments: {each}")


def require_whole(name: str, value: Any, least: int) -> None:
    """Raise ConfigError unless a setting is None or a whole number from `least` up."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if value is not None and (not whole or value < least):
        rule = f"it must be a whole number from {least} up, or None"
        raise ConfigError(explain(name, value, rule, f"Pass {least} or more"))


def on_first(comm: Communicator, action: Callable[[], str | None]) -> str:
    """Collective: run an action on rank 0; return its text ("" for None) on every rank.

    Raises its error on every rank.
    """
    found, fault = None, None
    if comm.rank == 0:
        try:
            found = action()
        except MpiparError as error:
            fault = error
    text = (found or "").encode()
    size = int(exchange(comm, (len(text),), fault)[0, 0])
    if size == 0 or comm.size == 1:
        return text.decode()
    mine = np.frombuffer(text, np.uint8).copy() if comm.rank == 0 else None
    return bytes(comm.broadcast(mine, src=0)).decode()
