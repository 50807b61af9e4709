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

from mpipar.errors import ConfigError, StateError, explain
from mpipar.parallel.fsdp.unit import Unit

LOOKS = 8  # elements of a block that are compared


class Watch:
    """See the module."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Be told by the optimisers of the shards; refuse those of the module's parameters."""
        self._blocks = [own for unit in units for own in unit.owns]
        self._stale = True
        self._ready = False  # shards have gradients that no optimiser of ours has used
        self._seen: list[bytes] = []
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

    def written(self) -> None:
        """The shards have other values."""
        self._stale = True

    def gathered(self) -> None:
        """All is gathered, whatever was the case."""
        self._stale, self._seen = False, self._look()

    def changed(self, pending: bool) -> bool:
        """Say at the beginning of a forward whether to gather; pending: between micro-batches.

        Raises StateError if shards were written to and nobody said so.
        """
        stale, seen = self._stale or (self._ready and not pending), self._look()
        if not stale and not self._ready and seen != self._seen:
            rule = "since the latest forward an optimiser or load_state_dict must have done so"
            fix = "Call shard_parameters() on every rank after writing to them"
            raise StateError(explain("shards", "written to", rule, fix))
        self._stale, self._seen = False, seen
        return stale

    def _look(self) -> list[bytes]:
        return [own[:: max(1, own.size // LOOKS)].tobytes() for own in self._blocks]


def _refusal(name: str) -> Callable[[], None]:
    """Return what an optimiser of a module's own parameter calls."""

    def refuse() -> None:
        rule = "FSDP has cut it, so an optimiser of the module's own parameters trains nothing"
        fix = "Make the optimiser after FSDP, of what its parameters() returns"
        raise ConfigError(explain("params", name, rule, fix))

    return refuse
