"""Parameters that several stages hold, like an embedding that is the output layer too.

    stage 0   token_embedding.weight, gradient of the lookups   ─┐
    stage 1                                                      ├─ all_reduce: both get the sum
    stage 2   token_embedding.weight, gradient of the logits    ─┘

Parameters of one global name (`Parameter.spec.name`) are one parameter: they begin with equal
values and get equal gradients, so they stay equal.  Each name costs one all_reduce a step among
the ranks that hold it.  Several on one rank are added there.
"""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpipar import rng
from mpipar.arrays import module_of
from mpipar.errors import MismatchError, MpiparError, StateError, explain
from mpipar.nn.linear import is_named
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.agreement import exchange

Ranks = tuple[int, ...]


class TiedGradients:
    """Adds up the gradients of parameters of one name.

    names: those that this rank holds and other ranks, or other stages of its own, hold too.
    """

    def __init__(self, comm: Communicator, parameters: list[Any]) -> None:
        """Collective: find out which names several stages hold.

        Raises MismatchError on every rank if parameters of one name have other shapes or dtypes.
        """
        named: dict[str, list[Any]] = {}
        for param in parameters:
            name = getattr(getattr(param, "spec", None), "name", "")
            if is_named(name) and param.requires_grad:
                named.setdefault(name, []).append(param)
        holders = _holders(comm, named)
        self._comms: dict[Ranks, Communicator] = {}
        for ranks in sorted(set(holders.values())):
            if len(ranks) > 1 and comm.rank in ranks:
                self._comms[ranks] = _make(comm, ranks)
        shared = {n: p for n, p in sorted(named.items()) if len(p) > 1 or len(holders[n]) > 1}
        self.names = tuple(shared)
        self._tied = [(params, self._comms.get(holders[name])) for name, params in shared.items()]
        self._before: dict[int, Any] = {}

    def holds(self, parameters: Iterable[Any]) -> bool:
        """Say whether one of these is tied."""
        own = {id(param) for params, _ in self._tied for param in params}
        return any(id(param) in own for param in parameters)

    def fault(self) -> StateError | None:
        """Return what is wrong with the gradients that are there before a step."""
        for params, _ in self._tied:
            for param in params:
                if param.grad is not None and getattr(param, "home", None) is not None:
                    rule = "a tied parameter that is synced over data ranks must have no gradient"
                    fix = "Clear the gradients before every step; take more micro-batches instead"
                    name = param.spec.name
                    return StateError(explain("param", name, f"{rule} when a step begins", fix))
        return None

    def begin(self) -> None:
        """Put aside the gradients that are there: they are sums already."""
        self._before.clear()
        for params, _ in self._tied:
            for param in params:
                if param.grad is not None:
                    self._before[id(param)] = param.grad
                    param.grad = None

    def sum(self) -> None:
        """Collective: replace the gradients of a step by their sums over all that hold them."""
        for params, comm in self._tied:
            like = params[0]  # its data may be elsewhere at this time (FSDP)
            total = module_of(like.data).zeros(like.spec.local_shape, like.data.dtype)
            for param in params:
                if param.grad is not None:
                    total += param.grad
            if comm is not None:
                total = comm.all_reduce(total, out=total)
            for param in params:
                before = self._before.pop(id(param), 0)
                param.grad = total + before  # a new array for each of them

    def destroy(self) -> None:
        """Collective: free the communicators."""
        while self._comms:
            self._comms.popitem()[1].destroy()


def _holders(comm: Communicator, named: dict[str, list[Any]]) -> dict[str, Ranks]:
    """Return for each name held here the ranks that hold it."""
    table = np.empty((len(named), 3), np.int64)  # hash of the name, rank, hash of shape and dtype
    for row, (name, params) in enumerate(sorted(named.items())):
        looks = {(param.spec.local_shape, param.data.dtype.name) for param in params}
        keys = rng.key(0, name), rng.key(1, *sorted(looks))
        table[row] = np.array([keys[0], 0, keys[1]], np.uint64).view(np.int64)
    table[:, 1] = comm.rank
    if comm.size > 1:
        table = comm.all_gather(table, dim=0, sizes="exchange")
    found: dict[str, Ranks] = {}
    error: MpiparError | None = None
    for name in named:
        rows = table[table[:, 0].view(np.uint64) == np.uint64(rng.key(0, name))]
        found[name] = tuple(sorted(set(rows[:, 1].tolist())))
        if len(set(rows[:, 2].tolist())) > 1:
            rule = f"stages on the ranks {found[name]} hold it in different shapes or dtypes"
            fix = "Parameters of one name are one parameter: give others another name"
            error = error or MismatchError(explain("param", name, rule, fix))
    exchange(comm, (), error)
    return found


def _make(comm: Communicator, ranks: Ranks) -> Communicator:
    """Return a communicator of these ranks; its members call this."""
    group = comm.process_group
    raw = cast(MPI.Intracomm, group.raw)
    everyone = raw.Get_group()
    chosen = everyone.Incl(list(ranks))
    made = raw.Create_group(chosen)
    chosen.Free()
    everyone.Free()
    try:
        name = f"tied parameters of {comm.name}"
        how: dict[str, Any] = {"reproducible": group.reproducible, "timeout": group.timeout}
        return Communicator(made, comm.device, name, **how)  # duplicates what it is given
    finally:
        made.Free()
