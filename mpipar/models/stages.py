"""A model cut into the stages of a pipeline, by layers and with equal work.

    stages(config, 3)     layers 0..4            5..9        10..11
                          embeddings, blocks     blocks      blocks, norm, logits

The output layer of a large vocabulary costs as much as several blocks, so the last stage has fewer
of them.  Every parameter has the name and the path that it has in the whole model (`blocks.5.`),
and begins with the same values, so the stages' state dicts are together the whole model's.  A tied
embedding is on the first and on the last stage.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.models.build import FAMILIES
from mpipar.models.config import ModelConfig
from mpipar.models.factories import Factories
from mpipar.models.transformer import Part, Transformer


def stages(config: ModelConfig, count: int, **factories: Any) -> Callable[[int], Transformer]:
    """Return the function from a stage's number to the part of the model that it holds.

    factories: those of `build`.  A stage takes and returns activations (B, S, C); the first takes
    tokens (B, S), the last returns logits, and its `loss_of(logits, targets)` their loss.

    Raises ConfigError for fewer layers than stages.
    """
    split = layer_split(config, count)
    make = Factories(**{name: make for name, make in factories.items() if make is not None})

    def stage(number: int) -> Transformer:
        part = Part(split[number], first=number == 0, last=number == count - 1)
        return FAMILIES[config.model](config, make, part)

    return stage


def layer_split(config: ModelConfig, count: int) -> tuple[range, ...]:
    """Return the layers of each of `count` stages: at least one, the costliest stage cheapest.

    Among the splits with the same costliest stage it is the one with the least sum of squares.
    Raises ConfigError for a count that is not between 1 and the number of layers.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= config.layers:
        rule = f"every stage has a layer at least, and the model has {config.layers}"
        fix = f"Choose 1 to {config.layers} stages, or a deeper model"
        raise ConfigError(explain("stages", count, rule, fix))
    block, head = costs(config)
    sizes = _least(config.layers, count, head / block)
    ends = accumulate(sizes, initial=0)
    return tuple(range(first, last) for first, last in pairwise(ends))


def costs(config: ModelConfig) -> tuple[float, float]:
    """Return the multiplications for a token in a block and in the output layer; lookups are free.

    Of the scores of attention half are masked: 2 products * seq / 2 keys * dim.
    """
    shared = config.kv_heads * config.head_dim
    attention = config.dim * (2 * config.dim + 2 * shared) + config.seq * config.dim
    matrices = 2 if config.model == "gpt2" else 3
    width = config.hidden * (config.top_k if config.experts else 1) + config.shared
    block = attention + matrices * config.dim * width + config.experts * config.dim
    return float(block), float(config.vocab * config.dim)


def _least(layers: int, count: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage; the head costs as much as so many of them.

    Whatever the last stage has, the others share the rest evenly, so only that has to be tried.
    """
    if count == 1:
        return (layers,)

    def shared(last: int) -> tuple[int, int, int]:
        """Return the stages before the last one that have how many layers, and those with more."""
        each, more = divmod(layers - last, count - 1)
        return count - 1 - more, each, more

    def cost(last: int) -> tuple[float, float]:
        less, each, more = shared(last)
        squares = less * each**2 + more * (each + 1) ** 2 + (last + head) ** 2
        return max(each + (more > 0), last + head), squares

    last = min(range(-(-layers // count), 0, -1), key=cost)
    less, each, more = shared(last)
    return (*[each] * less, *[each + 1] * more, last)
