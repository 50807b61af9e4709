"""Whether shards may have other values than those that were gathered last.

    backward, sync    shards have gradients, so an update may come    each forward gathers
    optimiser's step  it came                                         the next one gathers
    load_state_dict   they were written to                            the next one gathers
    forward           nothing since                                   the next one does not

All ranks do these things alike, so they gather alike, without asking each other.  An optimiser that
is not of mpipar says nothing: after it, as before, each forward gathers.  Who writes to shards at
another time gets an error: a few elements of each are compared.
"""

from collections.abc import Callable, Sequence

from mpipar.errors import BufferMismatchError, ConfigError, StateError, explain
from mpipar.parallel.fsdp.unit import Unit

LOOKS = 8  # elements of a block that are compared


class Watch:
    """See the module."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Be told by the optimisers of the shards; refuse those of the module's parameters."""
        self._blocks = [own for unit in units for own in unit.owns]
        self._units = units
        self._stale = True
        self._ready = False  # shards have gradients that no optimiser of ours has used
        self._seen: list[bytes] = []
        self.updates = 0  # how often they were given other values
        for unit in units:
            for name, param, shard in zip(unit.names, unit.params, unit.shards, strict=True):
                shard.on_update = self.updated
                param.on_update = _refusal(name)

    def reduced(self) -> None:
        """The shards have gradients."""
        self._ready = True

    def updated(self) -> None:
        """An optimiser is about to use them."""
        self._ready, self._stale = False, True
        self.updates += 1

    def written(self) -> None:
        """The shards have other values."""
        self.adopt()
        self._stale = True
        self.updates += 1

    def check_updates(self, updates: int) -> None:
        """Raise StateError if the shards have got other values since there were so many updates."""
        if updates != self.updates:
            rule = "the shards have got other values since its forward, which saved the old ones"
            fix = "Call optimizer.step(), load_state_dict and the like after backward"
            raise StateError(explain("backward", "too late", rule, fix))

    def gathered(self) -> None:
        """All is gathered, whatever was the case."""
        self.adopt()
        self._stale, self._seen = False, self._look()

    def changed(self, pending: bool) -> bool:
        """Say at the beginning of a forward whether to gather; pending: between micro-batches.

        Raises StateError if shards were written to and nobody said so.
        """
        stale = self._stale or (self._ready and not pending)
        told = stale or self._ready
        if told:
            stale = self.adopt() or stale
        seen = self._look()
        if not told and (seen != self._seen or self._assigned()):
            rule = "since the latest forward an optimiser or load_state_dict must have done so"
            fix = "Call shard_parameters() on every rank after writing to them"
            raise StateError(explain("shards", "written to", rule, fix))
        self._stale, self._seen = False, seen
        return stale

    def adopt(self) -> bool:
        """Copy arrays that were assigned to `shard.data` to where the shards lie; say if any were.

        Raises BufferMismatchError for one of another shape, and StateError, undoing it, if one was
        assigned to a parameter of the module.
        """
        assigned = self._assigned()
        for unit, number in assigned:
            shard, part = unit.shards[number], unit.parts[number]
            data, shard.data = shard.data, part
            if tuple(data.shape) != tuple(part.shape):
                rule = f"the shard of this rank has shape {tuple(part.shape)}"
                given = f"data of shape {tuple(data.shape)}"
                fix = "Assign that, or use load_full_state_dict()"
                raise BufferMismatchError(explain(unit.names[number], given, rule, fix))
            part[...] = data
        self.check_module()
        return bool(assigned)

    def check_module(self) -> None:
        """Raise StateError, and undo it, if data was assigned to a parameter of the module."""
        found = []
        for unit in self._units:
            for name, param, given in zip(unit.names, unit.params, unit.given, strict=True):
                if param.data is not given:
                    param.data = given
                    found.append(name)
        if found:
            rule = "FSDP has cut it, so only the shards in parameters() keep values"
            fix = "Assign to those, or use load_full_state_dict()"
            raise StateError(explain(f"{', '.join(found)}.data", "assigned", rule, fix))

    def _assigned(self) -> list[tuple[Unit, int]]:
        """Return the shards whose `data` is another array than FSDP's."""
        return [
            (unit, number)
            for unit in self._units
            for number, (shard, part) in enumerate(zip(unit.shards, unit.parts, strict=True))
            if shard.data is not part
        ]

    def _look(self) -> list[bytes]:
        return [own[:: max(1, own.size // LOOKS)].tobytes() for own in self._blocks]


def _refusal(name: str) -> Callable[[], None]:
    """Return what an optimiser of a module's own parameter calls."""

    def refuse() -> None:
        rule = "FSDP has cut it, so an optimiser of the module's own parameters trains nothing"
        fix = "Make the optimiser after FSDP, of what its parameters() returns"
        raise ConfigError(explain("params", name, rule, fix))

    return refuse
