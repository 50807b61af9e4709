"""The tree of modules: names, shared parameters, state, modes."""

import numpy as np
import pytest

from mpipar.errors import ConfigError
from mpipar.nn import Dropout, Embedding, LayerNorm, Linear, Module, Parameter, Spec


class Inner(Module):
    def __init__(self):
        self.linear = Linear(3, 2, name="linear")
        self.scale = Parameter(np.ones(2, np.float32))


class Outer(Module):
    def __init__(self):
        self.first = Inner()
        self.items = [Linear(2, 2), (LayerNorm(2), None)]
        self.table = {"a": Embedding(4, 2), "b": 7}
        self.tied = self.first.linear
        self.tied_weight = self.first.linear.weight
        self.dropout = Dropout(0.5)
        self.note = "no parameter"

    def forward(self, x):
        return self.items[0](self.first.linear(x))


NAMES = [
    "tied_weight",
    "first.scale",
    "first.linear.bias",
    "items.0.weight",
    "items.0.bias",
    "items.1.0.weight",
    "items.1.0.bias",
    "table.a.weight",
]


def test_names_are_attribute_paths_and_shared_parameters_count_once():
    model = Outer()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert len(model.parameters()) == len({id(p) for p in model.parameters()}) == len(NAMES)
    assert [name for name, _ in model.named_modules()] == [
        "", "first", "first.linear", "items.0", "items.1.0", "table.a", "dropout",
    ]  # fmt: skip


def test_a_cycle_of_modules_ends():
    model = Inner()
    model.parent = model
    assert len(model.parameters()) == 3


def test_state_goes_to_another_model_in_place_and_in_its_dtype():
    model, other = Outer(), Outer()
    for number, array in enumerate(model.state_dict().values()):
        array[...] = number + 0.5
    array = other.first.linear.weight.data
    state = {name: value.astype(np.float64) for name, value in model.state_dict().items()}
    other.load_state_dict(state)
    assert other.first.linear.weight.data is array
    assert array.dtype == np.float32
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, model.state_dict()[name])


def test_state_that_does_not_fit_is_refused_and_nothing_is_copied():
    model = Outer()
    state = {name: np.full_like(value, 9.0) for name, value in model.state_dict().items()}
    state["items.0.bias"] = np.zeros(3)
    state["extra"] = state.pop("first.scale")
    with pytest.raises(ConfigError) as error:
        model.load_state_dict(state)
    for part in ("first.scale is missing", "extra is unexpected", "items.0.bias has shape (3,)"):
        assert part in str(error.value)
    assert not any((value == 9.0).any() for value in model.state_dict().values())
    with pytest.raises(ConfigError, match=r"items\.0\.bias"):
        model.load_state_dict(state, strict=False)
    del state["items.0.bias"]
    model.load_state_dict(state, strict=False)
    assert (model.items[0].weight.data == 9.0).all()


def test_modes_reach_every_module():
    model = Outer()
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


def test_zero_grad_forgets_gradients():
    model = Outer()
    model(np.ones((5, 3), np.float32)).sum().backward()
    assert model.items[0].weight.grad is not None
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_parameter_always_has_a_spec():
    parameter = Parameter(np.zeros((2, 3)))
    assert parameter.requires_grad
    assert parameter.spec == Spec.replicated("", (2, 3))


def test_a_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Module"):
        Module()(1)
