"""Parameter and Module: a tree of attributes, read by walking it.  There is no registry.

A Module's members are its attributes that are Parameters or Modules, or lists, tuples and dicts of
those.  The name of a parameter is its attribute path, as in PyTorch:
`blocks.0.attention.qkv.weight`.  A parameter that can be reached by two paths (a tied weight)
counts once, under the first.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device, module_of
from mpipar.arrays import module as module_for
from mpipar.autograd import Tensor
from mpipar.autograd.tensor import is_float
from mpipar.errors import ConfigError, explain
from mpipar.nn.spec import Spec


class Parameter(Tensor):
    """A Tensor that is trained; `spec` says which block of which global array it holds.

    home: memory that the gradient shall lie in (part of a bucket that travels as one message); None
    where it is all the same.  on_update: called by an optimiser before it changes parameters.
    """

    __slots__ = ("home", "on_update", "spec")
    home: Array | None
    on_update: Callable[[], object] | None

    def __init__(self, data: Array, spec: Spec | None = None) -> None:
        """Take the local block.  spec=None: the whole of an array without a name."""
        super().__init__(data, requires_grad=True)
        self.home = None
        self.on_update = None
        self.spec = Spec.replicated("", self.data.shape) if spec is None else spec

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parameter":
        """Return a copy of the data, without gradient, and without hooks and home of this one."""
        made = memo[id(self)] = Parameter(self.data.copy(), self.spec)
        made.requires_grad = self.requires_grad
        return made


class Module:
    """Base of layers and models: a subclass sets attributes and defines `forward`.

        class MLP(mp.nn.Module):
            def __init__(self, dim):
                self.up = mp.nn.Linear(dim, 4 * dim, name="up")
                self.down = mp.nn.Linear(4 * dim, dim, name="down")

            def forward(self, x):
                return self.down(mp.functional.gelu(self.up(x)))

    Attributes that are Parameters or Modules, or lists, tuples and dicts of them, are its members;
    no `super().__init__()` is needed, and there are no buffers.  Names in `named_parameters` and
    `state_dict` are attribute paths, such as "up.weight", as in PyTorch; a layer's `name` decides
    its initial weights and files them in checkpoints (`Parameter.spec.name`).
    `training`, True at first, is set by `train()` and `eval()`.
    """

    training: bool = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args, **kwargs)

    def named_modules(self) -> Iterator[tuple[str, "Module"]]:
        """Yield (path, module) of this module ("") and all below it, each once, parents first."""
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [("", self)]
        while stack:
            path, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            below = [(_join(path, n), m) for n, m in module._members() if isinstance(m, Module)]
            stack.extend(reversed(below))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (path, parameter), each parameter once."""
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, member in module._members():
                if isinstance(member, Parameter) and id(member) not in seen:
                    seen.add(id(member))
                    yield _join(path, name), member

    def modules(self) -> Iterator["Module"]:
        """Yield this module and all below it."""
        for _, module in self.named_modules():
            yield module

    def parameters(self) -> list[Parameter]:
        """Return all parameters, each once."""
        return [parameter for _, parameter in self.named_parameters()]

    def state_dict(self) -> dict[str, Array]:
        """Return {path: array} of all parameters: local blocks, the very arrays in use."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Copy local blocks into the parameters, in place, in the parameters' dtypes.

        strict=False ignores missing and unexpected names.
        Raises ConfigError naming what is missing, unexpected, of another shape or no real numbers;
        then nothing was copied.
        """
        own = dict(self.named_parameters())
        state = number_arrays(state, own)
        problems = [f"{name} is missing" for name in own if strict and name not in state]
        problems += [f"{name} is unexpected" for name in state if strict and name not in own]
        for name in own.keys() & state.keys():
            given, shape = state[name].shape, own[name].data.shape
            if given != shape:
                problems.append(f"{name} has shape {given}, needed {shape}")
        if problems:
            rule = f"names and shapes must be those of {type(self).__name__}"
            raise ConfigError(explain("state", sorted(problems), rule, "Load this model's state"))
        for name in own.keys() & state.keys():
            array = own[name].data
            array[...] = module_of(array).asarray(state[name])

    def to(self, device: str) -> "Module":
        """Move all parameters to "cpu" or "cuda", before anything else refers to their arrays."""
        for parameter in self.parameters():
            here = parameter.data
            if device == "cuda":
                parameter.data = module_for("cuda").asarray(here)
            elif is_device(here):
                parameter.data = module_for("cuda").asnumpy(here)
            parameter.grad = None
        return self

    def train(self, mode: bool = True) -> "Module":
        """Set `training` here and below (dropout acts); returns self."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> "Module":
        """Unset `training` here and below; returns self."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def extra_repr(self) -> str:
        """Return what `repr` shows of this module besides those below it; a subclass defines it."""
        return ""

    def __repr__(self) -> str:
        """Return the tree of modules, neighbours in a list that look alike in one line."""
        return _tree(self, ())

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, Parameter or Module) of the attributes, containers opened."""
        for name, value in vars(self).items():
            yield from _open(name, value)


def _tree(module: Module, above: tuple[Module, ...]) -> str:
    """Return the text of a module and those below it; one that is `above` itself is cut short."""
    head = f"{type(module).__name__}({module.extra_repr()}"
    if module in above:
        return f"{head}...)"
    below = [(name, m) for name, m in module._members() if isinstance(m, Module)]
    texts = [(name, _tree(m, (*above, module))) for name, m in below]
    rows: list[str] = []
    for (text, _), alike in groupby(texts, key=lambda row: (row[1], _stem(row[0]))):
        first, *others = [name for name, _ in alike]
        if others:
            first += f"-{others[-1].rpartition('.')[2]}"
            text = f"{len(others) + 1} x {text}"
        rows += f"({first}): {text}".split("\n")
    return "\n".join([head, *[f"  {row}" for row in rows], ")"]) if rows else f"{head})"


def _stem(name: str) -> str:
    """Return the name of the list that a module is in, or its own if it is in none."""
    stem, _, last = name.rpartition(".")
    return f"{stem}." if last.isdigit() else name


def number_arrays(state: Any, own: Container[str]) -> dict[str, Any]:
    """Return a state with its values under the keys `own` as arrays.

    Raises ConfigError if it is no mapping, or if one of these is no array of real numbers.
    """
    if not isinstance(state, Mapping):
        rule = "it must map names to arrays"
        raise ConfigError(explain("state", type(state).__name__, rule, "Load a state_dict()"))
    out = dict(state)
    for key in [key for key in out if key in own]:
        value = out[key].data if isinstance(out[key], Tensor) else out[key]
        out[key] = value if is_device(value) else np.asarray(value)
        if out[key].dtype.kind not in "fiu" and not is_float(out[key].dtype):
            kind = value.dtype.name if hasattr(value, "dtype") else type(value).__name__
            rule = "it must be an array of real numbers"
            raise ConfigError(explain(f"state[{key!r}]", kind, rule, "Load a state_dict()"))
    return out


def tensors_of(params: Any, what: str = "params") -> list[Tensor]:
    """Return an iterable of Tensors as a list.

    Raises ConfigError for anything else, naming it and what to pass instead.
    """
    rule, fix = "it must be an iterable of Tensors", "Pass module.parameters(), or a list"
    if isinstance(params, Tensor):
        fix = "Pass a list: [tensor]"  # it can be iterated over, row by row
    elif isinstance(params, Iterable) and not isinstance(params, Module | dict | str):
        entries = list(params)
        wrong = [(n, x) for n, x in enumerate(entries) if not isinstance(x, Tensor)]
        if not wrong:
            return entries
        number, params = wrong[0]
        what, rule = f"{what}[{number}]", "it must be a Tensor"
        if isinstance(params, tuple):
            fix = "Pass module.parameters() instead of named_parameters()"
        elif hasattr(params, "dtype"):
            fix = "Make a parameter of the array: mp.nn.Parameter(array)"
    raise ConfigError(explain(what, type(params).__name__, rule, fix))


def _open(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Parameter | Module):
        yield name, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _open(f"{name}.{number}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _open(f"{name}.{key}", item)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
