"""The parameters of a gradient synchroniser, and where their gradients and results lie.

parameter   w2          w1          w0
slot        view ──┐    view ──┐    view ──┐       what this rank submits: `home` of the parameter
buckets     [ bucket 0         ]    [ bucket 1 ]
results     .grad <┘    .grad <┘    .grad <┘       the sums; in private memory the same arrays
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.comm import buckets
from mpipar.comm.shared_buckets import SharedBuckets, reserve
from mpipar.comm.window_memory import whole_lines
from mpipar.errors import ConfigError, StateError, explain


class Slot:
    """A parameter's place: its number, its bucket, its view there, and what is still to come.

    left: how many of its `uses` have not been submitted in this step.
    """

    __slots__ = ("bucket", "left", "number", "param", "uses", "view")

    def __init__(self, param: Any, number: int, uses: int) -> None:
        self.param, self.number = param, number
        self.uses = self.left = uses
        self.bucket: Any = None
        self.view: Any = None

    def check(self, grad: Any) -> None:
        """Raise if the parameter has all of its gradient, or `grad` is not like it."""
        name = name_of(self.param)
        if self.left == 0:
            rule = f"it was submitted {self.uses} times in this step and is synced already"
            fix = "Submit it once a step, or register it with uses= the number of its uses"
            raise StateError(explain("param", name, rule, fix))
        buckets.check_gradient(name, self.param.data, grad)


class Slots:
    """All slots, by number; `into` lets backward write to them.

    memory: the shared memory that the buckets are in, if they are.
    """

    def __init__(self, into: bool) -> None:
        self.all: list[Slot] = []
        self.memory: SharedBuckets | None = None
        self._memories: list[SharedBuckets] = []  # this and earlier ones: gradients lie there
        self._into = into
        self._of: dict[int, Slot] = {}

    def add(self, param: Any, uses: int) -> bool:
        """Give a parameter a slot; say whether it is a new one."""
        slot = self._of.get(id(param))
        new = slot is None
        if slot is None:
            slot = self._of[id(param)] = Slot(param, len(self.all), uses)
            self.all.append(slot)
        slot.uses = slot.left = uses
        return new

    def find(self, param: Any) -> Slot:
        """Return the slot of a parameter; raises ConfigError if it has none."""
        slot = self._of.get(id(param))
        if slot is None:
            rule = "it is not registered with this synchronizer"
            fix = "Call register([param]) first"
            raise ConfigError(explain("param", name_of(param), rule, fix))
        return slot

    def described(self) -> str:
        """Return what all ranks must have alike."""
        return repr([(s.param.data.shape, s.param.data.dtype.name) for s in self.all])

    def share(self, group: Any, wanted: bool | None) -> None:
        """Collective: get shared memory for all gradients, if that is wanted and there is some.

        Raises ConfigError on all ranks if `wanted` is True and there is none.
        """
        items = self._items()
        if any(item.device != "cpu" for item in items):
            if wanted:
                rule = "ranks share host memory, and some of these parameters are on a GPU"
                raise ConfigError(explain("shared", True, rule, "Pass None or False"))
            return
        self.memory = reserve(group, sum(whole_lines(item.nbytes) for item in items), wanted)
        if self.memory is not None:
            self._memories.append(self.memory)

    def fill(
        self,
        order: Sequence[int],
        capacity: float,
        wire: np.dtype | None,
        reduce: Callable[[buckets.Bucket], Any],
    ) -> buckets.Buckets:
        """Lay out buckets, filled in this order, and return them."""
        made = buckets.Buckets(self._items(), order, capacity, wire, reduce, self.memory)
        for slot in self.all:
            slot.bucket = made.bucket_of[slot.number]
            slot.view = slot.bucket.views[slot.number]
            if self._into and hasattr(slot.param, "home"):
                slot.param.home = slot.view
        return made

    def hand_out(self, used: np.ndarray) -> None:
        """Leave the results in the parameters, None where `used` is 0."""
        for slot in self.all:
            slot.param.grad = slot.bucket.results[slot.number] if used[slot.number] else None

    def give_back(self) -> None:
        """Let backward write where it likes; copy the gradients that lie in shared memory."""
        for slot in self.all:
            if self._into and hasattr(slot.param, "home"):
                slot.param.home = None
            grad = slot.param.grad
            if grad is not None and any(memory.holds(grad) for memory in self._memories):
                slot.param.grad = grad.copy()
        self._memories.clear()
        self.memory = None

    def _items(self) -> list[buckets.Item]:
        return [buckets.Item.like(slot.param.data) for slot in self.all]


def name_of(param: Any) -> str:
    """Return what to call a parameter in a message."""
    spec = getattr(param, "spec", None)
    name = "" if spec is None else spec.name
    return name or f"a tensor of shape {getattr(param, 'shape', None)}"
