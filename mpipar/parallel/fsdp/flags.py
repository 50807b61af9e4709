"""Which parameters are trained: `requires_grad` may be set between steps, on all ranks alike.

It may be set on a shard or on the module's own parameter; the next forward takes it over to the
other one.
"""

from collections.abc import Callable, Sequence

from mpipar.errors import StateError, explain
from mpipar.parallel.fsdp.unit import Unit


class Flags:
    """The flags of all parameters; `epoch` counts how often some have changed.

    listen: called with a unit and the number of a parameter in it that is trained from now on.
    """

    def __init__(self, units: Sequence[Unit], listen: Callable[[Unit, int], None]) -> None:
        self._units, self._listen = units, listen
        self._wants = [[param.requires_grad for param in unit.params] for unit in units]
        self.epoch = 0

    def follow(self) -> None:
        """Take over what has been set since the last call."""
        changed = False
        for unit, wants in zip(self._units, self._wants, strict=True):
            for number, (param, shard) in enumerate(zip(unit.params, unit.shards, strict=True)):
                if param.wants == shard.wants == wants[number]:
                    continue
                changed = True
                wants[number] = not wants[number]
                param.wants = shard.wants = wants[number]
                if wants[number]:
                    self._listen(unit, number)
                else:
                    param.grad = None
        self.epoch += changed

    def check(self, epoch: int) -> None:
        """Raise StateError if flags have changed since a forward in this epoch."""
        if epoch != self.epoch:
            rule = "another forward has taken it over, so this backward leads to other parameters"
            fix = "Set it between a backward and the next forward"
            raise StateError(explain("requires_grad", "set after forward", rule, fix))
