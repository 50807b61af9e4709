"""Gradients of whole models, learning, state, and text out of a model."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mpipar.autograd import gradcheck
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build, generate
from mpipar.models.generate import choose
from mpipar.optim import AdamW
from tests.unit.substitute import substitute

TINY = partial(ModelConfig, vocab=11, layers=2, dim=16, heads=4, seq=8, seed=3)
CONFIGS = {
    "gpt2": TINY(),
    "gpt2-untied": TINY(tied=False),
    "llama": TINY(model="llama", kv_heads=2),
    "llama-tied": TINY(model="llama", tied=True),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
CYCLE = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6]), 6)


def windows(seq=8):
    starts = np.arange(8)[:, None] + np.arange(seq + 1)
    return CYCLE[starts][:, :-1], CYCLE[starts][:, 1:]


def fit(model, steps=60, lr=1e-2):
    optimizer = AdamW(model.parameters(), lr)
    tokens, targets = windows()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count = model.loss(tokens, targets)
        total.backward()
        optimizer.step(grad_scale=1 / count)
        losses.append(total.item() / count)
    return losses


@each
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_of_the_whole_model(config, dropout):
    model = build(replace(config, dtype="float64", dropout=dropout))
    for number, array in enumerate(model.state_dict().values()):
        array += 0.2 * np.random.default_rng(number).standard_normal(array.shape)
    tokens, targets = windows()
    targets[0, :2] = -100

    def loss(*values):
        with substitute(model, values):
            return model.loss(tokens[:2], targets[:2])[0]

    gradcheck(loss, model.parameters())


def test_it_learns_with_dropout_and_in_sixteen_bits():
    assert fit(build(TINY(dropout=0.1)), steps=40)[-1] < 1.2
    assert fit(build(TINY(dtype="bfloat16")), steps=40)[-1] < 1.0


@each
def test_state_makes_another_model_the_same(config):
    model, other = build(config), build(replace(config, seed=99))
    tokens, _ = windows()
    assert not np.array_equal(model(tokens).data, other(tokens).data)
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(model(tokens).data, other(tokens).data)


def test_a_tied_weight_counts_once_and_gets_both_gradients():
    model = build(TINY())
    names = [name for name, _ in model.named_parameters()]
    assert names.count("token_embedding.weight") == 1
    assert "head.weight" not in names
    assert "head.weight" in build(TINY(tied=False)).state_dict()
    tokens, targets = windows()
    model.loss(tokens, targets)[0].backward()
    unused = [row for row in range(11) if row not in CYCLE]
    assert np.abs(model.token_embedding.weight.grad[unused]).max() > 0  # as an output only


def test_every_parameter_gets_a_gradient():
    for config in CONFIGS.values():
        model = build(config)
        model.loss(*windows())[0].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@each
def test_it_learns_a_sequence_and_continues_it(config):
    model = build(config)
    losses = fit(model, steps=90)
    assert losses[0] > 2.0
    assert losses[-1] < 0.5  # the first tokens of a window are ambiguous
    out = generate(model, CYCLE[:8], 20, temperature=0.0)
    np.testing.assert_array_equal(out, CYCLE[8:28])
    assert model.training


def test_draws_depend_on_the_seed_alone():
    model = build(TINY())
    first = generate(model, CYCLE[:3], 12, seed=1)
    np.testing.assert_array_equal(first, generate(model, CYCLE[:3], 12, seed=1))
    np.testing.assert_array_equal(first[:5], generate(model, CYCLE[:3], 5, seed=1))
    assert not np.array_equal(first, generate(model, CYCLE[:3], 12, seed=2))
    assert generate(model, CYCLE[:3], 0).shape == (0,)


def test_gathered_logits_decide():
    model = build(TINY())
    model.eval()
    seen = []

    def gather(logits):
        seen.append(logits.shape)
        return np.eye(11)[[7]]

    assert list(generate(model, CYCLE[:3], 2, temperature=0.0, gather=gather)) == [7, 7]
    assert seen == [(1, 11), (1, 11)]
    assert not model.training


def test_choices_follow_the_distribution():
    logits = np.log([0.1, 0.2, 0.7])
    draws = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([choose(logits, 1.0, draw) for draw in draws])
    assert list(counts) == [100, 200, 700]
    assert choose(logits, 0.0, 0.0) == 2
    assert choose(np.array([-np.inf, 0.0]), 1.0, 0.0) == 1
    cold = np.bincount([choose(logits, 0.5, draw) for draw in draws])
    assert abs(cold[2] - 1000 * 0.49 / 0.54) < 2


def test_a_prompt_that_cannot_be_continued_is_refused():
    model = build(TINY())
    with pytest.raises(ConfigError, match="at least one token"):
        generate(model, np.array([], np.int64), 3)
    with pytest.raises(ConfigError, match="temperature"):
        generate(model, CYCLE[:2], 3, temperature=-1.0)
    with pytest.raises(ConfigError, match="vocabulary"):
        generate(model, np.array([99]), 3)
