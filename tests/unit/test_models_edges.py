"""Tokens, prompts, states and numbers that layers and models must refuse, or take as they are."""

import numpy as np
import pytest

import mpipar as mp
from mpipar import functional as F
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError, NonFiniteError
from mpipar.models import ModelConfig, build
from mpipar.models.generate import choose, generate

CONFIG = ModelConfig(model="gpt2", vocab=7, layers=1, dim=8, heads=2, seq=6)
MODEL = build(CONFIG)


def test_lists_of_tokens_are_taken() -> None:
    tokens = [[1, 2, 3]]
    np.testing.assert_array_equal(MODEL(tokens).data, MODEL(np.array(tokens)).data)
    assert MODEL.loss(tokens, [[2, 3, -100]])[1] == 2
    assert mp.nn.Embedding(3, 2)([1, 2]).shape == (2, 2)


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        ([1, 2], None),
        ([[[1]]], None),
        (np.zeros((0, 3), int), None),
        (np.zeros((2, 0), int), None),
        ([[1, 2, 3]], [0]),
        ([[1, 2]], [-1, 0]),
        ([[1, 2]], [0.0, 1.0]),
    ],
)
def test_tokens_and_positions_of_other_shapes_are_refused(tokens, positions) -> None:
    with pytest.raises(BufferMismatchError, match=r"tokens|positions"):
        MODEL(tokens, positions)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"count": 1.5}, "count"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [7]}, "prompt"),
    ],
)
def test_generation_needs_numbers(settings, name: str) -> None:
    given = {"prompt": [1], "count": 1, **settings}
    with pytest.raises(ConfigError, match=name):
        generate(MODEL, given.pop("prompt"), given.pop("count"), **given)


def test_a_token_that_is_drawn_is_in_the_vocabulary() -> None:
    assert choose(np.array([0.0, 0.0, -1e4]), 1.0, np.nextafter(1.0, 2.0)) == 1
    with pytest.raises(NonFiniteError, match="logits"):
        choose(np.array([np.nan, 0.0]), 1.0, 0.5)


@pytest.mark.parametrize("value", [None, "abc", np.ones((3, 2)) * 1j])
def test_a_state_must_be_arrays_of_real_numbers(value) -> None:
    table = mp.nn.Embedding(3, 2)
    optimiser = mp.optim.SGD(table.parameters(), lr=1.0, momentum=0.9)
    for owner in (table, optimiser):
        with pytest.raises(ConfigError, match="state"):
            owner.load_state_dict(value)
        state = owner.state_dict()
        with pytest.raises(ConfigError, match="real numbers"):
            owner.load_state_dict({**state, next(iter(state)): value})


@pytest.mark.parametrize(
    "call",
    [
        F.softmax,
        F.log_softmax,
        F.gelu,
        F.silu,
        lambda x: F.swiglu(x, x),
        lambda x: F.rms_norm(x, np.ones(2)),
        lambda x: F.dropout(x, 0.5, 1),
        lambda x: F.cross_entropy(x, np.zeros(2, int)),
    ],
)
def test_operations_on_integers_are_refused(call) -> None:
    with pytest.raises(DtypeMismatchError, match="floating-point"):
        call(np.ones((2, 2), int))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.softmax(np.float64(1.0)),
        lambda: F.softmax(np.ones((2, 0))),
        lambda: F.log_softmax(np.ones(2), dim=3),
        lambda: F.cross_entropy(np.ones((2, 0)), np.zeros(2, int)),
        lambda: mp.nn.Dropout(0.5)(mp.Tensor(1.0)),
    ],
)
def test_empty_and_missing_dimensions_are_refused(call) -> None:
    with pytest.raises(BufferMismatchError):
        call()


def test_an_empty_batch_has_an_empty_softmax() -> None:
    assert F.softmax(np.ones((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mp.nn.Linear("2", 2), "in_features"),
        (lambda: mp.nn.Linear(2, 2.0), "out_features"),
        (lambda: mp.nn.Linear(2, 2, std=float("nan")), "std"),
        (lambda: mp.nn.Embedding(2, 2, std=-1.0), "std"),
        (lambda: mp.nn.LayerNorm(2, eps=-1.0), "eps"),
        (lambda: mp.nn.RMSNorm(2, eps=float("inf")), "eps"),
        (lambda: mp.nn.Linear(2, 2, seed="one"), "seed"),
        (lambda: mp.nn.Linear(2, 2, dtype="wide"), "dtype"),
        (lambda: mp.nn.RMSNorm(2, dtype="int32"), "dtype"),
        (lambda: mp.nn.Dropout("half"), "p="),
        (lambda: ModelConfig(layers=1.5), "layers"),
    ],
)
def test_sizes_and_scales_of_layers(make, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make()
