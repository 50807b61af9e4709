"""Continue a sequence token by token, each drawn from what the model predicts.

`cached` keeps keys and values of the tokens so far, and reads each once; else every token costs a
forward pass over the context.  The numbers are the same.  Once the context is full it moves on by a
token at a time, all positions change, and nothing that was kept is right any more.
"""

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, Protocol

import numpy as np

from mpipar import rng
from mpipar.arrays import Array
from mpipar.autograd import Tensor, no_grad
from mpipar.errors import ConfigError, NonFiniteError, explain
from mpipar.models.cache import remembering
from mpipar.models.config import ModelConfig
from mpipar.nn.embedding import check_ids


class Model(Protocol):
    """What writes: a Transformer, or what runs one on several ranks."""

    config: ModelConfig

    @property
    def training(self) -> bool:
        """Whether dropout acts."""

    def train(self, mode: bool = True) -> Any:
        """Let dropout act, or not."""

    def eval(self) -> Any:
        """Let dropout rest."""

    def __call__(self, tokens: Array) -> Tensor:
        """Return the logits (1, S, V local) of tokens (1, S)."""


def generate(
    model: Model,
    prompt: Array,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    gather: Callable[[Tensor], Tensor] | None = None,
    cached: bool = False,
) -> np.ndarray:
    """Return `count` tokens (count,) that follow the prompt (S,), S >= 1.

    temperature: 0 takes the likeliest token, 1 draws from the model's distribution.  The draws
    depend on the seed only.  The model looks back on config.seq tokens.
    With parallel layers all ranks of their group call this, and `gather` makes this rank's part of
    the logits (1, V local) whole; then all of them return the same tokens.
    cached: for a Transformer whose ranks each attend to whole sequences.
    Raises ConfigError for an empty prompt, a token outside the vocabulary or a negative number, and
    NonFiniteError for logits without a finite maximum.
    """
    if np.ndim(prompt) != 1 or len(prompt) == 0:
        rule = "it must be one sequence of at least one token"
        raise ConfigError(explain("prompt.shape", np.shape(prompt), rule, "Pass (S,), S >= 1"))
    prompt = np.asarray(prompt)
    check_ids("prompt", prompt, model.config.vocab)
    if not isinstance(count, int | np.integer) or count < 0:
        rule = "it must be a number of tokens, an integer"
        raise ConfigError(explain("count", count, rule, "Pass >= 0"))
    if not isinstance(temperature, Real) or not temperature >= 0:
        rule = "it must be a number, and not negative"
        raise ConfigError(explain("temperature", temperature, rule, "Pass >= 0"))
    tokens = np.empty(len(prompt) + count, np.int64)
    tokens[: len(prompt)] = prompt
    draws = rng.uniform(rng.key(seed, "generate"), np.arange(count, dtype=np.uint64))
    was_training = model.training
    model.eval()
    try:
        with no_grad():
            steps = _read_cached if cached else _read
            for stop, last in enumerate(steps(model, tokens, len(prompt)), len(prompt)):
                logits = np.asarray(last if gather is None else gather(last), np.float64)[0]
                tokens[stop] = choose(logits, temperature, draws[stop - len(prompt)])
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]


def _read(model: Any, tokens: np.ndarray, start: int) -> Iterator[Tensor]:
    """Yield the logits (1, V local) of every token from `start` on, when those before are there."""
    for stop in range(start, len(tokens)):
        yield model(tokens[None, max(0, stop - model.config.seq) : stop])[:, -1]


def _read_cached(model: Any, tokens: np.ndarray, start: int) -> Iterator[Tensor]:
    """Do so, reading each token once as long as all are in the context."""
    full = min(len(tokens), model.config.seq + 1)
    read = 0
    with remembering(model, full - 1):
        for stop in range(start, full):
            yield model(tokens[None, read:stop], np.arange(read, stop))[:, -1]
            read = stop
    yield from _read(model, tokens, max(start, full))


def choose(logits: np.ndarray, temperature: float, draw: float) -> int:
    """Return the token whose part of the cumulative distribution holds draw, in [0, 1)."""
    if not np.isfinite(logits.max()):
        rule = "the largest logit must be finite"
        fix = "Check the weights: training may have diverged"
        raise NonFiniteError(explain("logits.max()", float(logits.max()), rule, fix))
    if temperature == 0.0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # minus infinity is right
        weights = np.exp((logits - logits.max()) / temperature)  # (V,)
    cumulative = weights.cumsum()
    drawn = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return min(drawn, int(np.flatnonzero(weights)[-1]))  # the product may be rounded up
