"""The tree of modules: names, shared parameters, state, modes."""

import copy
import pydoc
import re
import threading
from functools import partial

import numpy as np
import pytest

import mpipar.functional as F
from mpipar import models, nn, optim
from mpipar.autograd import Tensor
from mpipar.errors import ConfigError
from mpipar.nn import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Spec,
    Tanh,
)


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


def test_a_copy_is_trained_by_itself():
    """As for a moving average of weights; hooks may lead to what cannot be copied."""
    model, heard = Outer(), []
    model.first.scale.requires_grad = False
    lock = threading.Lock()
    model.first.linear.weight.register_hook(lambda _: heard.append(lock))
    model(np.ones((5, 3), np.float32)).sum().backward()
    copied = copy.deepcopy(model)
    copied(np.ones((5, 3), np.float32)).sum().backward()
    assert len(heard) == 1
    assert copied.tied_weight is copied.first.linear.weight is not model.tied_weight
    for (name, new), (_, old) in zip(
        copied.named_parameters(), model.named_parameters(), strict=True
    ):
        np.testing.assert_array_equal(new.data, old.data)
        assert not np.shares_memory(new.data, old.data), name
        assert (new.spec, new.requires_grad) == (old.spec, old.requires_grad)
        assert (new.grad is None) == (old.grad is None)


TREE = """\
Outer(
  (first): Inner(
    (linear): Linear(in_features=3, out_features=2, bias=True)
  )
  (items.0): Linear(in_features=2, out_features=2, bias=True)
  (items.1.0): LayerNorm(2, eps=1e-05)
  (table.a): Embedding(num=4, dim=2)
  (tied): Linear(in_features=3, out_features=2, bias=True)
  (dropout): Dropout(p=0.5)
)"""
MODEL = """\
Llama(
  (token_embedding): Embedding(num=256, dim=8)
  (dropout): Dropout(p=0.0)
  (blocks.0-2): 3 x Block(
    (norm1): RMSNorm(8, eps=1e-05)
    (attention): SelfAttention(
      (qkv): Linear(in_features=8, out_features=24, bias=False)
      (projection): Linear(in_features=8, out_features=8, bias=False)
    )
    (dropout1): Dropout(p=0.0)
    (norm2): RMSNorm(8, eps=1e-05)
    (mlp): GatedMLP(
      (gate_up): Linear(in_features=8, out_features=64, bias=False)
      (down): Linear(in_features=32, out_features=8, bias=False)
    )
    (dropout2): Dropout(p=0.0)
  )
  (norm): RMSNorm(8, eps=1e-05)
  (head): Embedding(num=256, dim=8)
)"""


def test_a_module_shows_its_tree():
    assert repr(Outer()) == TREE
    config = models.ModelConfig(model="llama", layers=3, dim=8, heads=2)
    assert repr(models.build(config)) == MODEL
    cycle = Inner()
    cycle.parent = cycle
    assert "(parent): Inner(...)" in repr(cycle)
    assert repr(Parameter(np.ones(1))) == "Parameter([1.], requires_grad=True)"
    layers = Sequential(GELU(), ReLU(), ReLU())
    assert repr(layers) == ("Sequential(\n  (0): GELU(approximate='tanh')\n  (1-2): 2 x ReLU()\n)")


@pytest.mark.parametrize("module", [nn, optim, models, F])
def test_help_lists_what_there_is(module):
    text = pydoc.plain(pydoc.render_doc(module))
    for name in module.__all__:
        assert re.search(rf"^    (class )?{name}\(", text, re.MULTILINE), name


def test_sequential():
    layers = Sequential(Linear(3, 4), ReLU(), Linear(4, 2))
    assert [name for name, _ in layers.named_parameters()] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    expected = layers[2](np.maximum(layers[0](x).data, 0)).data
    np.testing.assert_array_equal(layers(x).data, expected)
    assert len(layers) == len(list(layers)) == 3
    assert layers[-1] is layers[2]
    assert list(layers[1:]) == list(layers)[1:]
    assert Sequential()(x) is x
    assert not layers.eval()[1].training
    state = {name: value + 1 for name, value in layers.state_dict().items()}
    layers.load_state_dict(state)
    np.testing.assert_array_equal(layers[0].weight.data, state["0.weight"])
    shared = ReLU()
    assert len(Sequential(shared, Linear(2, 2), shared)) == 3


@pytest.mark.parametrize(
    ("module", "fix"), [([ReLU()], r"Sequential\(\*modules\)"), (F.relu, "Make it a Module")]
)
def test_sequential_takes_modules_only(module, fix):
    with pytest.raises(ConfigError, match=rf"modules\[0\]=.* it must be a Module\. .*{fix}"):
        Sequential(module)


EXACT_GELU = partial(F.gelu, approximate="none")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (ReLU(), F.relu),
        (GELU(), F.gelu),
        (SiLU(), F.silu),
        (Tanh(), F.tanh),
        (Sigmoid(), F.sigmoid),
        (GELU("none"), EXACT_GELU),
    ],
)
def test_activations(module, function):
    x = np.random.default_rng(0).standard_normal((4, 6))
    np.testing.assert_array_equal(module(Tensor(x)).data, function(x).data)


def test_a_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Module"):
        Module()(1)
