"""Which parameters make up a unit.

    module   token_embedding   blocks.0   blocks.1   norm        a norm's weight has few elements
    units    ─── the rest ───  ── 1 ───   ── 2 ───   the rest    whole: all those below the minimum

A parameter that several units use, or one and the rest (a tied weight), belongs to the rest.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Module, Parameter
from mpipar.parallel.fsdp.config import FsdpConfig
from mpipar.parallel.fsdp.unit import Named


class Plan(NamedTuple):
    """The parameters of each unit: `units` as the modules that were named, `rest`, and `whole`."""

    units: list[list[Named]]
    rest: list[Named]
    whole: list[Named]


def modules_of(module: Module, units: Sequence[Module] | None) -> list[Module]:
    """Return the modules that are units: those given, else the blocks of the model, else none.

    Raises ConfigError for something that is not a module below `module`, or lies in another unit.
    """
    if units is None:
        units = getattr(module, "blocks", [])
        units = list(units.values()) if isinstance(units, dict) else units
        units = [block for block in units if isinstance(block, Module)]
    below = {id(child) for child in module.modules()} - {id(module)}
    for number, unit in enumerate(units):
        name = f"units[{number}]"
        if not isinstance(unit, Module) or id(unit) not in below:
            rule = "it must be a module below the one that is sharded"
            raise ConfigError(explain(name, type(unit).__name__, rule, "Pass list(model.blocks)"))
        others = [other for n, other in enumerate(units) if n != number]
        if any(unit is child for other in others for child in other.modules()):
            rule = "it must be named once, and not lie in another unit"
            raise ConfigError(explain(name, type(unit).__name__, rule, "Leave one of the two out"))
    return list(units)


def plan(module: Module, units: Sequence[Module], config: FsdpConfig) -> Plan:
    """Return who belongs where.

    Raises ConfigError if a unit has parameters of several dtypes, and for experts that are spread:
    each rank has others.
    """
    users: dict[int, set[int]] = {}  # parameter -> the units that use it, -1 for the rest
    reach = [(n, child) for n, unit in enumerate(units) for child in unit.modules()]
    reach += [(-1, child) for child in _outside(module, units)]
    for number, child in reach:
        for member in _members(child):
            if isinstance(member, Parameter):
                users.setdefault(id(member), set()).add(number)
    made = Plan([[] for _ in units], [], [])
    for name, param in module.named_parameters():
        _refuse_spread(name, param)
        where = users[id(param)]
        if _stays_whole(param, config):
            made.whole.append(Named(name, param))
        elif len(where) == 1 and -1 not in where:
            made.units[min(where)].append(Named(name, param))
        else:
            made.rest.append(Named(name, param))
    for members in (*made.units, made.rest, made.whole):
        _one_dtype(members)
    return made


def _stays_whole(param: Parameter, config: FsdpConfig) -> bool:
    small = param.data.size < config.min_param_size
    return small or (not config.flatten_parameters and param.data.ndim == 0)


def _refuse_spread(name: str, param: Parameter) -> None:
    if "ep" in param.spec.placements:
        rule = "what is sharded is the same on all ranks, and experts over ep are others on each"
        raise ConfigError(explain(name, param.spec.placements["ep"], rule, "Choose an ep of 1"))


def _one_dtype(members: list[Named]) -> None:
    found = {member.param.data.dtype.name: member.name for member in members}
    if len(found) > 1:
        rule = "the parameters of a unit must have one dtype"
        raise ConfigError(explain("dtype", found, rule, "Convert them"))


def _outside(module: Module, units: Sequence[Module]) -> Iterator[Module]:
    """Yield the module and those below it that can be reached without entering a unit."""
    seen = {id(unit) for unit in units}
    stack: list[Module] = [module]
    while stack:
        child = stack.pop()
        if id(child) not in seen:
            seen.add(id(child))
            yield child
            stack.extend(member for member in _members(child) if isinstance(member, Module))


def _members(module: Module) -> Iterator[Parameter | Module]:
    """Yield the parameters and modules that are attributes of this one, containers opened."""
    stack: list[Any] = list(vars(module).values())
    while stack:
        value = stack.pop()
        if isinstance(value, Parameter | Module):
            yield value
        elif isinstance(value, list | tuple):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
