"""What `mpipar bench train` can be told, and what of it cannot work."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mpipar.bench import train_peer
from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig

Mode = Literal["ddp", "fsdp"]
COUNTS = ("batch", "steps", "repeats", "threads")


@dataclass(frozen=True)
class Train:
    """Time training steps of a GPT, beside PyTorch's in the same run; started by mpiexec.

    tokens/s: of all ranks together. peer: PyTorch's. ratio: ours over the peer's, above 1 is
    faster. MFU: the arithmetic of the model a second (6 N + 6 L s d operations a token, over N
    parameters, L layers, s tokens, dim d) over the rate of its own matrix products here. alone:
    tokens/s of the same local batches without communication. overhead: what communication and
    sharding add to a step of that. RSS MB, peer MB: the most memory of a rank, ours and PyTorch's,
    in MiB.
    """

    modes: tuple[Mode, ...] = ("ddp", "fsdp")
    """DataParallel beside PyTorch's DistributedDataParallel, FSDP beside its fully_shard."""
    layers: int = 4
    """Transformer blocks."""
    dim: int = 256
    """Width of the residual stream."""
    heads: int = 8
    """Attention heads."""
    seq: int = 256
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a step on each rank."""
    vocab: int = 256
    """Different tokens."""
    steps: int = 1
    """Steps of a turn; ten before the first are not timed."""
    repeats: int = 21
    """Turns that each side gets; medians count, of ratio and overhead those of the turns' own."""
    threads: int = 1
    """Threads of each rank."""
    seed: int = 0
    """Of the tokens."""
    peer: Annotated[Literal["torch"] | None, arg(metavar="torch")] = None
    """Time PyTorch too, where it is installed."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""

    def model(self) -> ModelConfig:
        """Return the model; raises ConfigError for sizes that cannot be."""
        return ModelConfig(
            "gpt2",
            vocab=self.vocab,
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            seq=self.seq,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step on one rank."""
        return self.batch * self.seq

    def products(self) -> list[tuple[int, int, int]]:
        """Return (n, k, m) of the matrix products (n, k) x (k, m) of one block and the output.

        Of every layer of `out` x `in` weights: forward, the input's and the weight's gradient.
        """
        d, t = self.dim, self.tokens
        layers = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d), (d, self.vocab)]
        return [s for i, o in layers for s in ((t, i, o), (t, o, i), (o, t, i))]


def check(config: Train) -> None:
    """Raise ConfigError for what cannot be measured."""
    config.model()
    for name in COUNTS:
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(explain(name, value, "it must be at least 1", "Choose a larger one"))
    if config.seed < 0:
        raise ConfigError(explain("seed", config.seed, "it must not be negative", "Pass 0"))
    if not config.modes or len(set(config.modes)) < len(config.modes):
        rule = "there must be one at least, and each once"
        raise ConfigError(explain("modes", config.modes, rule, "Pass ddp, fsdp or both"))
    train_peer.check(config.peer)


def operations(shape: tuple[int, int, int]) -> float:
    """Return the floating-point operations of a product (n, k) x (k, m)."""
    return 2.0 * math.prod(shape)
