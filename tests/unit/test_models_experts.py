"""Models with experts, and blocks that are recomputed: one process."""

import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpipar import rng
from mpipar.autograd import Tensor
from mpipar.errors import ConfigError
from mpipar.models import ModelConfig, build, stages
from mpipar.models.stages import costs
from mpipar.nn.init import draw
from mpipar.nn.module import Module, Parameter
from mpipar.nn.spec import Spec

CONFIG = ModelConfig(vocab=11, layers=2, dim=16, heads=4, seq=8, dtype="float64", dropout=0.2)
TOKENS = np.arange(16).reshape(2, 8) % 11


class FirstExpert(Module):
    """Stands for experts: has their parameters, and uses the first one of them."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int, **settings: Any) -> None:
        self.settings = settings
        for part, shape in (("router", (experts, dim)), ("up", (experts, hidden, dim))):
            spec = Spec.replicated(f"{settings['name']}.{part}", shape)
            setattr(self, part, Parameter(draw(spec, 0, 0.02, None, "float64"), spec))

    def forward(self, x: Tensor, positions: np.ndarray) -> Tensor:
        assert positions.shape == x.shape[1:2]
        return x @ self.up[0].T @ self.up[0]


def test_experts_take_the_place_of_the_mlp() -> None:
    for model, activation in (("gpt2", "gelu"), ("llama", "swiglu")):
        config = replace(CONFIG, model=model, hidden=32, experts=4, shared=8)
        whole = build(config, experts=FirstExpert)
        mlp = whole.blocks[1].mlp
        assert mlp.settings["activation"] == activation
        assert mlp.settings["shared"] == 8
        assert mlp.settings["down_std"] == config.residual_std
        assert whole(TOKENS).shape == (2, 8, 11)
        second = stages(config, 2, experts=FirstExpert)(1)
        assert "blocks.1.mlp.router" in second.state_dict()


def test_arithmetic_counts_the_experts_that_a_token_uses() -> None:
    few, many = (
        build(replace(CONFIG, experts=n, top_k=2), experts=FirstExpert).flops_per_token(8)
        for n in (4, 8)
    )
    assert many - few == 6 * 2 * 4 * 16  # four more rows of two routers
    one, two = (costs(replace(CONFIG, experts=4, top_k=k))[0] for k in (1, 2))
    assert two - one == 2 * 16 * 64


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"experts": -1}, "experts"),
        ({"experts": 4, "top_k": 0}, "top_k"),
        ({"experts": 2, "top_k": 3}, r"top_k=3.*2 experts"),
        ({"shared": 8}, "shared"),
    ],
)
def test_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CONFIG, **settings)


def test_who_makes_experts_must_be_told() -> None:
    with pytest.raises(ConfigError, match=r"experts.*factories"):
        build(replace(CONFIG, experts=4))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_recomputed_blocks_give_the_same_numbers(model: str) -> None:
    config = replace(CONFIG, model=model, hidden=32)
    gradients: list[list[Any]] = []
    for recompute in (False, True):
        made = build(config, recompute=recompute)
        with rng.at(1, 0):
            loss, _ = made.loss(TOKENS, TOKENS)
            loss.backward()
        gradients.append([loss.item(), *(param.grad for param in made.parameters())])
    for plain, again in zip(*gradients, strict=True):
        np.testing.assert_array_equal(plain, again)


def test_recomputed_blocks_keep_their_inputs_only() -> None:
    config = ModelConfig(vocab=11, layers=8, dim=64, heads=4, seq=64)
    tokens = np.zeros((4, 64), int)
    kept = []
    for recompute in (False, True):
        model = build(config, recompute=recompute)
        gc.collect()
        tracemalloc.start()
        loss, _ = model.loss(tokens, tokens)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        loss.backward()
    inputs = config.layers * 4 * 64 * 64 * 4  # bytes
    assert kept[1] < 2 * inputs < kept[0] / 4
