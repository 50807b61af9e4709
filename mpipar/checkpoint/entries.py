"""What there is to save in a tree: modules, optimisers, arrays; each array with its global name.

    {"model": model, "optimizer": optimizer, "state": {"step": 100}}

    model.safetensors       blocks.0.mlp.up.weight        named as in the model's state_dict
    optimizer.safetensors   blocks.0.mlp.up.weight.m      the same, and the slot
    state.json              {"step": 100}                 what JSON can say, rank 0's

Names are those of the whole model on every mesh: stages of a pipeline know them, FSDP gives its
shards by path, and a tied weight counts once.  Parameters are told apart by their specs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device
from mpipar.autograd import Tensor
from mpipar.checkpoint.format import CODES
from mpipar.errors import ConfigError, explain
from mpipar.nn.linear import is_named
from mpipar.nn.spec import Spec
from mpipar.optim.optimizer import Optimizer

STATE = "state"
Tree = Mapping[str, Any]
Files = dict[str, list["Entry"]]


@dataclass(frozen=True)
class Entry:
    """A named array of which this rank has what `spec` says.

    held: whether this rank's values count; a rank with no element of a parameter never counts its
    steps, for example.  on_update: called before the array is written to.
    """

    name: str
    spec: Spec
    array: Array
    held: bool = True
    on_update: Callable[[], object] | None = None


def files_of(tree: Tree, called: str = "tree") -> Files:
    """Return the entries of each file, by the key in the tree; all but "state".

    A name may come twice on one rank: a tied weight of two stages.  called: the argument's name.
    Raises ConfigError for keys that name no file, and for values that hold no arrays, or arrays of
    what no file can hold.
    """
    if not isinstance(tree, Mapping):
        rule = "it must map names to what is saved under them"
        raise ConfigError(explain(called, type(tree).__name__, rule, 'Pass {"model": model}'))
    for key in tree:
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", key):
            rule = "a key must name a file: letters, digits, - and _"
            raise ConfigError(explain(f"key of {called}", key, rule, 'Use "model" or "ema", say'))
    paths = {}
    for value in tree.values():
        if hasattr(value, "named_parameters"):
            paths.update({id(param): name for name, param in value.named_parameters()})
    files = {}
    for key, value in tree.items():
        if key != STATE:
            entries = _entries(f"{called}[{key!r}]", value, paths)
            files[key] = [_checked(entry) for entry in entries]
    return files


def _entries(called: str, value: Any, paths: Mapping[int, str]) -> Iterator[Entry]:
    if isinstance(value, Optimizer):
        yield from _of_optimizer(value, paths)
    elif hasattr(value, "named_parameters"):
        for name, param in value.named_parameters():
            yield _of_array(name, param)
    elif isinstance(value, Mapping):
        for name, array in value.items():
            yield _of_array(str(name), array)
    else:
        rule = "it must be a module, an optimiser, or a dict of arrays"
        fix = 'Numbers and texts go under "state"'
        raise ConfigError(explain(called, type(value).__name__, rule, fix))


def _of_array(name: str, value: Any) -> Entry:
    """Return the entry of a parameter, or of an array that every rank holds whole."""
    array = value.data if isinstance(value, Tensor) else value
    if not is_device(array) and not isinstance(array, np.ndarray):
        rule = "it must be an array; what it is filled with is loaded in place"
        raise ConfigError(explain(name, type(value).__name__, rule, "Pass an array, or a Tensor"))
    spec = getattr(value, "spec", Spec.replicated(name, array.shape))
    return Entry(name, spec, array, on_update=getattr(value, "on_update", None))


def _of_optimizer(optimizer: Optimizer, paths: Mapping[int, str]) -> Iterator[Entry]:
    """Yield the slots of every parameter, under its path in the model where that is in the tree."""
    for number, param in enumerate(optimizer.params()):
        spec = getattr(param, "spec", Spec.replicated("", param.data.shape))
        own = spec.name if is_named(spec.name) else str(number)
        name = paths.get(id(param), own)
        some = param.data.size > 0 or not prod(spec.shape)
        for slot, array in optimizer.state[optimizer.names[id(param)]].items():
            label = f"{name}.{slot}"
            if slot == "step":
                yield Entry(label, Spec.replicated(label, array.shape), array, some)
            else:
                yield Entry(label, spec, array)


def _checked(entry: Entry) -> Entry:
    """Return the entry, if a file can hold its dtype and it is as large as its spec says."""
    if entry.array.dtype.name not in CODES:
        rule, fix = f"a file holds {', '.join(CODES)}", 'Convert it; texts go under "state"'
        raise ConfigError(explain(f"dtype of {entry.name}", entry.array.dtype.name, rule, fix))
    if tuple(entry.array.shape) != entry.spec.local_shape:
        rule = f"this rank's part of it must be {entry.spec.local_shape}, by its spec"
        fix = "Save what holds the values: FSDP's wrapper, not the module inside it"
        raise ConfigError(explain(entry.name, tuple(entry.array.shape), rule, fix))
    return entry
