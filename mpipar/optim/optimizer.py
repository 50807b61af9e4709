"""What all optimisers share: groups, state by global name, float32 masters of 16-bit parameters.

State is per parameter and elementwise, so a rank that holds a shard updates exactly what the whole
would have there, without any communication.  It is filed under the parameter's `spec.name`:
another mesh finds it again, cut by another spec.
"""

from collections.abc import Iterable, Iterator
from math import inf
from numbers import Real
from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype, is_sixteen_bit, module_of
from mpipar.autograd import Tensor
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.nn.module import Module, number_arrays, tensors_of
from mpipar.nn.spec import Spec

Group = dict[str, Any]  # "params", a list of Tensors, and the settings that they share


class Optimizer:
    """Base of the optimisers: a subclass names its `slots` and defines `update`.

    params: parameters, or dicts with "params" and any of the optimiser's settings ("lr", "betas",
    ...), which then hold for these parameters.  Weight decay applies to parameters with two or more
    GLOBAL dimensions (not to biases and norms), unless decay_all=True or the dict states it; so
    `param_groups` may have two groups for one that was passed.
    Parameters of 16 bits get a float32 master copy; it is updated, and rounded once into them.
    """

    slots: tuple[str, ...] = ()  # names of the arrays kept for each parameter

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        settings: dict[str, Any],
        decay_all: bool = False,
    ) -> None:
        """Make the groups and the state, all zeros.

        settings: "lr", "weight_decay" and the subclass's own, for groups that do not state them.

        Raises ConfigError for a setting out of range or unknown, something that is no parameter, no
        parameters at all, or one given twice.
        """
        check_settings(settings)
        self.param_groups: list[Group] = []
        for own in _as_groups(params, settings):
            for decay, members in _by_decay(own, settings["weight_decay"], decay_all):
                group = {**settings, **own, "params": members, "weight_decay": decay}
                self.param_groups.append(group)
        self.names = _names(list(self.params()))
        self.state = {
            self.names[id(param)]: self._initial(param, group)
            for group in self.param_groups
            for param in group["params"]
        }

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
        check_settings({"lr": value})
        for group in self.param_groups:
            group["lr"] = float(value)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for param in self.params():
            param.grad = None

    def step(self, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, which is first multiplied by grad_scale.

        Raises ConfigError for a setting of a group out of range, and BufferMismatchError for a
        gradient of another shape than its parameter; then nothing was updated.
        """
        self._check_step(grad_scale)
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

    def _check_step(self, grad_scale: float) -> None:
        """Raise if a setting that was changed, or a gradient, cannot be right."""
        if not isinstance(grad_scale, Real):
            rule = "it must be a number"
            raise ConfigError(explain("grad_scale", grad_scale, rule, "Pass 1.0 for no scaling"))
        for number, group in enumerate(self.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            check_settings(settings, f"param_groups[{number}]")
            for param in group["params"]:
                if (told := getattr(param, "on_update", None)) is not None:
                    told()
                if param.grad is not None and param.grad.shape != param.data.shape:
                    name = f"grad.shape of {self.names[id(param)]}"
                    rule = f"it must be that of the parameter, {param.data.shape}"
                    fix = "Reshape the gradient: broadcast, it would be another one"
                    raise BufferMismatchError(explain(name, param.grad.shape, rule, fix))

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """Return the names of the arrays kept for each parameter of a group."""
        return self.slots

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

        Raises ConfigError naming what is missing, unexpected, of another shape or no real numbers.
        """
        own = self.state_dict()
        state = number_arrays(state, own)
        wrong = [key for key in own if key in state and state[key].shape != own[key].shape]
        problems = {
            "missing": sorted(own.keys() - state.keys()),
            "unexpected": sorted(state.keys() - own.keys()),
            "of another shape": wrong,
        }
        found = {what: keys for what, keys in problems.items() if keys}
        if found:
            rule = "it must be that of an optimiser of the same kind over the same parameters"
            raise ConfigError(explain("state", found, rule, "Load what state_dict() gave"))
        for key, array in own.items():
            array[...] = module_of(array).asarray(state[key])

    def __repr__(self) -> str:
        """Return the settings of each group and how many parameters it has."""
        lines = [type(self).__name__ + "("]
        for number, group in enumerate(self.param_groups):
            settings = [f"{key}={value}" for key, value in group.items() if key != "params"]
            count = len(group["params"])
            size = f"{count} parameter{'s' * (count != 1)}"
            lines.append(f"  group {number}: {', '.join([size, *settings])}")
        return "\n".join([*lines, ")"])

    def _initial(self, param: Tensor, group: Group) -> dict[str, Array]:
        xp = module_of(param.data)
        wide = compute_dtype(param.data.dtype)
        state = {slot: xp.zeros(param.data.shape, wide) for slot in self.slots_of(group)}
        state["step"] = np.zeros(1, np.int64)
        if is_sixteen_bit(param.data.dtype):
            state["master"] = param.data.astype(wide, order="C")  # a kernel takes no other order
        return state


LIMITS = {"lr": inf, "weight_decay": inf, "eps": inf, "momentum": inf, "betas": 1.0}


def check_settings(settings: dict[str, Any], group: str = "") -> None:
    """Raise ConfigError unless all settings are numbers from 0 up to, but not at, their limits.

    group: where they stand, for the message: "params[1]".
    """
    for key, value in settings.items():
        name = f"{group}[{key!r}]" if group else key
        if key != "betas":
            _check_range(name, value, LIMITS[key])
            continue
        if not isinstance(value, tuple | list) or len(value) != 2:
            rule = "it must be two numbers, for the mean of gradients and of their squares"
            raise ConfigError(explain(name, value, rule, "Pass (0.9, 0.999), for example"))
        for i, beta in enumerate(value):
            _check_range(f"{name}[{i}]", beta, LIMITS[key])


def _check_range(name: str, value: Any, high: float) -> None:
    """Raise ConfigError unless value is a number with 0 <= value < high."""
    if not isinstance(value, Real) or not 0 <= float(value) < high:
        rule = f"it must be a number in [0, {high:g})"
        raise ConfigError(explain(name, value, rule, "Choose one in this range"))


def _as_groups(params: Any, settings: dict[str, Any]) -> list[Group]:
    """Return what was passed as groups, each with the settings that it states itself."""
    if isinstance(params, dict):
        rule = "groups must come in a list"
        raise ConfigError(explain("params", list(params), rule, "Pass [group], or parameters"))
    entries = params
    if isinstance(params, Iterable) and not isinstance(params, Tensor | Module):
        entries = list(params)
    if isinstance(entries, list) and any(isinstance(entry, dict) for entry in entries):
        groups = [_as_group(entry, f"params[{i}]", settings) for i, entry in enumerate(entries)]
    else:
        groups = [{"params": tensors_of(entries)}]
    members = [param for group in groups for param in group["params"]]
    if not members:
        rule = "there must be parameters, or there is nothing to optimise"
        raise ConfigError(explain("params", [], rule, "Pass module.parameters()"))
    for param in members:
        if not param.is_leaf:
            rule = "a parameter must be a leaf, not the result of an operation"
            fix = "Pass the tensor that was made with requires_grad=True"
            raise ConfigError(explain("params", f"tensor of shape {param.shape}", rule, fix))
    return groups


def _as_group(entry: Any, name: str, settings: dict[str, Any]) -> Group:
    """Return a group that was passed, with a list of parameters; checks what it states."""
    if not isinstance(entry, dict):
        rule = "where one entry is a dict, all of them must be"
        fix = 'Pass {"params": [parameter]}'
        raise ConfigError(explain(name, type(entry).__name__, rule, fix))
    known = ["params", *settings]
    unknown = [key for key in entry if key not in known]
    if unknown or "params" not in entry:
        rule = f"a group must have params, and may have {', '.join(settings)}; nothing else"
        fix = f"Leave out {unknown[0]!r}, or correct it" if unknown else "Add params"
        raise ConfigError(explain(f"keys of {name}", list(entry), rule, fix))
    own = {key: value for key, value in entry.items() if key != "params"}
    check_settings(own, name)
    params = entry["params"]
    members = [params] if isinstance(params, Tensor) else tensors_of(params, f"{name}['params']")
    return {"params": members, **own}


def _by_decay(
    entry: Group, weight_decay: float, decay_all: bool
) -> list[tuple[float, list[Tensor]]]:
    """Split the parameters of one group into those that decay and those that do not."""
    params: list[Tensor] = entry["params"]
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
        rule = "a parameter must belong to one group, once"
        raise ConfigError(explain("params", len(params), rule, "Pass each parameter once"))
    names = [param.spec.name if hasattr(param, "spec") else "" for param in params]
    if "" in names or len(set(names)) != len(names):
        names = [str(number) for number in range(len(params))]
    return {id(param): name for param, name in zip(params, names, strict=True)}
