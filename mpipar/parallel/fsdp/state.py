"""What is where: whole values from shards and back, and who holds which elements.

shards           rank 0: w[0:6]   rank 1: w[6:12]       state_dict, on each rank its own
full_state_dict  w of shape (3, 4) on every rank        one all_gather a unit
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpipar.arrays import Array, module_of
from mpipar.errors import ConfigError, explain
from mpipar.nn.module import Parameter, number_arrays
from mpipar.parallel.fsdp.links import Links
from mpipar.parallel.fsdp.unit import Unit


@dataclass(frozen=True)
class ShardInfo:
    """Which elements of a parameter a rank holds.

    name: its path in the module; shape: of the whole; rank: of the communicator, the lowest that
    holds them; start, stop: the elements, row-major; offset: where they begin in the rank's shard
    of the unit.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """The same as stop."""
        return self.stop


def describe(units: Sequence[Unit]) -> Iterator[ShardInfo]:
    """Yield an entry for each parameter and each rank that has some of it."""
    for unit in units:
        for number, name in enumerate(unit.names):
            shape = unit.layout.shapes[number]
            for rank in range(unit.cut.ranks):
                share = unit.layout.share(number, rank)
                if share.start < share.stop or (rank == 0 and 0 in shape):
                    yield ShardInfo(name, shape, rank, share.start, share.stop, share.offset)


def whole_values(unit: Unit, links: Links) -> Array:
    """Collective: return the values of a unit as one new flat array, in the dtype of its shards."""
    whole = unit.xp.empty(unit.layout.total, unit.wide)
    for segment, own in zip(unit.layout.segments, unit.owns, strict=True):
        if unit.cut.ranks == 1:
            whole[segment.where] = own
        else:
            assert links.gather is not None
            what = f"{unit.label} for its state"
            links.gather.all_gather(own, whole[segment.where], segment.sizes, what).wait()
    return whole


def gather_state(units: Sequence[Unit], links: Links) -> dict[str, Array]:
    """Collective: return {name: whole array} of all parameters, on every rank."""
    state = {}
    for unit in units:
        whole = whole_values(unit, links)
        for number, name in enumerate(unit.names):
            state[name] = unit.xp.array(unit.view(whole, number))
    return state


def load_shards(shards: Mapping[str, Parameter], state: Mapping[str, Any]) -> None:
    """Copy arrays like the shards into them; raises ConfigError as load_state does."""
    given = _checked(state, {name: tuple(s.data.shape) for name, s in shards.items()}, "shards")
    for name, shard in shards.items():
        shard.data[...] = module_of(shard.data).asarray(given[name])


def load_state(units: Sequence[Unit], state: Mapping[str, Any]) -> None:
    """Copy this rank's parts of whole arrays into the shards; no message.

    Raises ConfigError naming what is missing, unexpected, of another shape or no real numbers; then
    nothing was copied.
    """
    shapes = {n: s for unit in units for n, s in zip(unit.names, unit.layout.shapes, strict=True)}
    state = _checked(state, shapes, "the whole module")
    for unit in units:
        for number, (name, shard) in enumerate(zip(unit.names, unit.shards, strict=True)):
            share = unit.layout.share(number, unit.cut.rank)
            part = module_of(shard.data).asarray(state[name]).reshape(-1)[share.start : share.stop]
            shard.data[...] = part.reshape(shard.data.shape)


def _checked(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, Array]:
    """Return the state's values as arrays of these shapes."""
    found = number_arrays(state, shapes)
    problems = [f"{name} is missing" for name in shapes if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in shapes]
    for name in shapes.keys() & found.keys():
        if tuple(found[name].shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(found[name].shape)}, needed {shapes[name]}")
    if problems:
        rule = f"names and shapes must be those of {what}"
        fix = "Load what state_dict() or full_state_dict() gave"
        raise ConfigError(explain("state", sorted(problems), rule, fix))
    return found
