"""Models cut into stages: names, values, costs, and the same logits as the whole."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build, layer_split, stages
from mpipar.models.stages import costs

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 7))


def config(**options: Any) -> ModelConfig:
    base: dict[str, Any] = {"vocab": 40, "layers": 5, "dim": 16, "heads": 4, "seq": 8}
    return ModelConfig(**{**base, "dtype": "float64", **options})


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_are_the_whole_model(model: str, tied: bool, count: int) -> None:
    made = config(model=model, tied=tied)
    whole, make = build(made), stages(made, count)
    parts = [make(number) for number in range(count)]
    joined: dict[str, np.ndarray] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            if name in joined:  # a tied table, on the first and on the last stage
                assert name == "token_embedding.weight"
                assert tied
                np.testing.assert_array_equal(value, joined[name])
            joined[name] = value
        for name, param in part.named_parameters():
            assert param.spec.name == name
    own = whole.state_dict()
    assert joined.keys() == own.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(joined[name], value)
    x: Any = TOKENS
    for part in parts:
        x = part(x)
    np.testing.assert_allclose(x.data, whole(TOKENS).data, rtol=1e-13, atol=1e-13)
    loss, tokens = parts[-1].loss_of(x, TOKENS)
    expected, expected_tokens = whole.loss(TOKENS, TOKENS)
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-13)
    assert tokens == expected_tokens
    flops = sum(part.flops_per_token(8) for part in parts)
    np.testing.assert_allclose(flops, whole.flops_per_token(8), rtol=1e-13)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_positions_can_be_set(model: str) -> None:
    """As for a part of the sequence: all stages must have them."""
    made = config(model=model)
    make = stages(made, 2)
    x: Any = TOKENS[:, :4]
    positions = np.array([0, 3, 4, 7])
    for number in range(2):
        part = make(number)
        part.positions = positions
        x = part(x)
    whole = build(made)
    expected = whole(TOKENS[:, :4], positions)
    np.testing.assert_allclose(x.data, expected.data, rtol=1e-13, atol=1e-13)
    whole.positions = positions
    np.testing.assert_array_equal(whole(TOKENS[:, :4]).data, expected.data)


def test_the_costliest_stage_is_as_cheap_as_can_be() -> None:
    for layers in range(1, 9):
        for vocab in (1, 200, 2000, 20000):
            made = config(layers=layers, vocab=vocab)
            block, head = costs(made)
            for count in range(1, layers + 1):
                split = layer_split(made, count)
                assert [n for layers in split for n in layers] == list(range(layers))
                cost = [len(r) * block for r in split]
                cost[-1] += head
                best = min(max(c) for c in _all(layers, count, block, head))
                assert max(cost) == pytest.approx(best)


def _all(layers: int, count: int, block: float, head: float) -> list[list[float]]:
    """Return the costs of all splits."""
    from itertools import combinations

    found = []
    for cuts in combinations(range(1, layers), count - 1):
        cost = [(b - a) * block for a, b in pairwise((0, *cuts, layers))]
        cost[-1] += head
        found.append(cost)
    return found


def test_splits_to_read() -> None:
    small = config(layers=12, vocab=1)
    assert [len(r) for r in layer_split(small, 4)] == [3, 3, 3, 3]
    assert sorted(len(r) for r in layer_split(small, 5)) == [2, 2, 2, 3, 3]
    gpt2 = ModelConfig(vocab=50257, layers=12, dim=768, heads=12, seq=1024)
    assert [len(r) for r in layer_split(gpt2, 2)] == [8, 4]
    assert len(layer_split(ModelConfig(layers=96), 64)) == 64


def test_more_stages_than_layers() -> None:
    for count in (0, 6, True, 2.0):
        with pytest.raises(ConfigError, match=r"the model has 5.*Choose 1 to 5 stages"):
            stages(config(), count)  # type: ignore[arg-type]
