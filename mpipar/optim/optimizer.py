"""What all optimisers share: groups, state by global name, float32 masters of 16-bit parameters.

State is per parameter and elementwise, so a rank that holds a shard updates exactly what the whole
would have there, without any communication.  It is filed under the parameter's `spec.name`:
another mesh finds it again, cut by another spec.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypedDict, cast

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_sixteen_bit, module_of
from mpipar.autograd import Tensor
from mpipar.errors import ConfigError, explain
from mpipar.nn.spec import Spec


class Group(TypedDict):
    """Parameters that share a learning rate and a weight decay."""

    params: list[Tensor]
    lr: float
    weight_decay: float


class Optimizer:
    """Base of the optimisers: a subclass names its `slots` and defines `update`.

    params: parameters, or dicts with "params" and their own "lr" or "weight_decay".  Weight decay
    applies to parameters with two or more GLOBAL dimensions (not to biases and norms), unless
    decay_all=True or the dict states it.
    Parameters of 16 bits get a float32 master copy; it is updated, and rounded once into them.
    """

    slots: tuple[str, ...] = ()  # names of the arrays kept for each parameter

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        """Make the groups and the state, all zeros.

        Raises ConfigError for a negative rate or decay, no parameters, or one given twice.
        """
        check_range("lr", lr, 0.0)
        check_range("weight_decay", weight_decay, 0.0)
        self.param_groups: list[Group] = []
        for entry in _as_groups(params):
            rate = entry.get("lr", lr)
            for decay, members in _by_decay(entry, weight_decay, decay_all):
                self.param_groups.append({"params": members, "lr": rate, "weight_decay": decay})
        self.names = _names([p for group in self.param_groups for p in group["params"]])
        self.state = {self.names[id(p)]: self._initial(p) for p in self.params()}

    def params(self) -> Iterator[Tensor]:
        """Yield all parameters, group by group."""
        for group in self.param_groups:
            yield from group["params"]

    @property
    def lr(self) -> float:
        """The learning rate of the first group; setting it sets that of every group."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = float(value)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in self.params():
            param.grad = None

    def step(self, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, which is first multiplied by grad_scale."""
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                state = self.state[self.names[id(param)]]
                state["step"] += 1
                xp = module_of(param.data)
                value: Array = state.get("master", param.data)
                solid = xp.asarray(value, order="C")  # kernels take no strided views: a copy then
                grad = xp.asarray(grad, value.dtype, order="C")
                self.update(solid, grad, state, group, grad_scale)
                if solid is not param.data:
                    param.data[...] = solid

    def update(
        self, value: Array, grad: Array, state: dict[str, Array], group: Group, grad_scale: float
    ) -> None:
        """Update `value` and the slots of one parameter in place; `grad` is left as it is."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Array]:
        """Return {"<parameter>.<slot>": array}: local blocks, the very arrays in use.

        <parameter> is the spec's name, or the parameter's number where names are empty or not
        unique.  The slot "step" is the number of updates, an int64 array of shape (1,).
        """
        return {
            f"{name}.{slot}": array
            for name, slots in self.state.items()
            for slot, array in slots.items()
        }

    def state_specs(self) -> dict[str, Spec]:
        """Return the spec of every array of state_dict(): that of its parameter."""
        specs = {}
        for param in self.params():
            name = self.names[id(param)]
            for slot, array in self.state[name].items():
                key = f"{name}.{slot}"
                whole = Spec.replicated(key, array.shape)
                specs[key] = whole if slot == "step" else getattr(param, "spec", whole)
        return specs

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the arrays of a state_dict() into this optimiser's.

        Raises ConfigError naming what is missing, unexpected, or of another shape.
        """
        own = self.state_dict()
        wrong = [key for key in own if key in state and np.shape(state[key]) != own[key].shape]
        problems = {
            "missing": sorted(own.keys() - state.keys()),
            "unexpected": sorted(state.keys() - own.keys()),
            "of another shape": wrong,
        }
        found = {what: keys for what, keys in problems.items() if keys}
        if found:
            rule = "the state belongs to an optimiser of the same kind over the same parameters"
            raise ConfigError(explain("state", found, rule, "Load what state_dict() gave"))
        for key, array in own.items():
            array[...] = module_of(array).asarray(state[key])

    def _initial(self, param: Tensor) -> dict[str, Array]:
        xp = module_of(param.data)
        wide = compute_dtype(param.data.dtype)
        state = {slot: xp.zeros(param.data.shape, wide) for slot in self.slots}
        state["step"] = np.zeros(1, np.int64)
        if is_sixteen_bit(param.data.dtype):
            state["master"] = param.data.astype(wide)
        return state


def check_range(name: str, value: float, low: float, high: float = np.inf) -> None:
    """Raise ConfigError unless low <= value < high."""
    if not low <= value < high:
        rule = f"it lies in [{low:g}, {high:g})"
        raise ConfigError(explain(name, value, rule, "Choose a value in this range"))


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    entries = list(params)
    if not entries:
        raise ConfigError(explain("params", [], "there is nothing to optimise", "Pass parameters"))
    if isinstance(entries[0], dict):
        return [{**entry, "params": list(entry["params"])} for entry in entries]
    return [{"params": entries}]


def _by_decay(
    entry: dict[str, Any], weight_decay: float, decay_all: bool
) -> list[tuple[float, list[Tensor]]]:
    """Split the parameters of one group into those that decay and those that do not."""
    params = cast(list[Tensor], entry["params"])
    if decay_all or "weight_decay" in entry or weight_decay == 0.0:
        return [(entry.get("weight_decay", weight_decay), params)]
    split: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in params:
        split[_global_ndim(param) >= 2].append(param)
    return [(weight_decay if decays else 0.0, ps) for decays, ps in split.items() if ps]


def _global_ndim(param: Tensor) -> int:
    spec = getattr(param, "spec", None)
    return len(spec.shape) if spec is not None else param.data.ndim


def _names(params: list[Tensor]) -> dict[int, str]:
    """Return id -> key of each parameter: its spec's name, or its number if names are no keys."""
    if len({id(param) for param in params}) != len(params):
        rule = "a parameter belongs to one group, once"
        raise ConfigError(explain("params", len(params), rule, "Pass each parameter once"))
    names = [param.spec.name if hasattr(param, "spec") else "" for param in params]
    if "" in names or len(set(names)) != len(names):
        names = [str(number) for number in range(len(params))]
    return {id(param): name for param, name in zip(params, names, strict=True)}
