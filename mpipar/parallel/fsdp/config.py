"""What FSDP can be told, and what each strategy leaves on a rank.

                     parameters       gradients        optimiser's state
    NO_SHARD         whole            whole            whole                 data parallel
    SHARD_OPTIMIZER  whole            whole            1 / p                 ZeRO-1
    SHARD_GRAD_OP    whole            1 / p            1 / p                 ZeRO-2
    FULL_SHARD       1 / p            1 / p            1 / p                 ZeRO-3
    HYBRID_SHARD     1 / shard_size   1 / shard_size   1 / shard_size        ZeRO-3 within a group

Rajbhandari et al., ZeRO (SC 2020); Zhao et al., PyTorch FSDP (VLDB 2023), whose names these are.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.errors import ConfigError, explain

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD", "HYBRID_SHARD")
SIXTEEN_BITS = ("bfloat16", "float16")
_said: set[str] = set()


class NothingToOffloadWarning(UserWarning):
    """cpu_offload was asked for where everything is in host memory."""


@dataclass(frozen=True)
class FsdpConfig:
    """Settings of FSDP, the same on every rank; `dataclasses.asdict` gives plain values.

    sharding_strategy: what is cut over the ranks: the optimiser's state ("SHARD_OPTIMIZER",
    ZeRO-1), gradients too ("SHARD_GRAD_OP", ZeRO-2), parameters too ("FULL_SHARD", ZeRO-3, and
    "HYBRID_SHARD", the same within groups of shard_size ranks), or nothing ("NO_SHARD").
    shard_size: for HYBRID_SHARD, how many neighbouring ranks share one copy of the parameters.
    min_param_size: parameters with fewer elements stay whole on every rank.
    cpu_offload: keep shards and the optimiser's state in host memory.
    mixed_precision: None, or "bfloat16" or "float16": what is gathered and computed with, while
    shards, and with them the optimiser, stay in the dtype of the parameters.
    reduce_dtype: in which gradients travel; None: the one that they are computed in.  16-bit sums
    are taken in float32 and rounded once.
    flatten_parameters: cut the parameters of a unit as one array; else each by its first dimension.
    prefetch: gather the next unit while one is computed, which takes the memory of a third unit
    beside one that is whole and its gradient; None: if that is little beside what a rank keeps.
    bucket_mb: at most so much, in 2^20 bytes, travels as one message, and at most so much of the
    gradients (or one message) is on its way at a time.

    Raises ConfigError for a value that cannot work.
    """

    sharding_strategy: str = "FULL_SHARD"
    shard_size: int | None = None
    min_param_size: int = 1000
    cpu_offload: bool = False
    mixed_precision: str | None = None
    reduce_dtype: str | None = None
    flatten_parameters: bool = True
    bucket_mb: float = 25
    prefetch: bool | None = None

    def __post_init__(self) -> None:
        """Check what does not depend on the number of ranks."""
        _one_of("sharding_strategy", self.sharding_strategy, STRATEGIES)
        _one_of("mixed_precision", self.mixed_precision, (None, *SIXTEEN_BITS))
        _one_of("reduce_dtype", self.reduce_dtype, (None, "float32", *SIXTEEN_BITS))
        _one_of("prefetch", self.prefetch, (None, True, False))
        if not _is_count(self.min_param_size, 0):
            rule = "it must be a number of elements"
            raise ConfigError(
                explain("min_param_size", self.min_param_size, rule, "Pass 0 or more")
            )
        if not isinstance(self.bucket_mb, int | float) or not self.bucket_mb > 0:
            rule = "a message must have a positive size, in 2^20 bytes"
            raise ConfigError(explain("bucket_mb", self.bucket_mb, rule, "Pass 25, or a fraction"))
        hybrid = self.sharding_strategy == "HYBRID_SHARD"
        if hybrid and not _is_count(self.shard_size, 1):
            rule = "HYBRID_SHARD needs the number of ranks that share one copy"
            raise ConfigError(explain("shard_size", self.shard_size, rule, "Pass 2, for example"))
        if not hybrid and self.shard_size is not None:
            rule = f"it must be None for {self.sharding_strategy}"
            fix = 'Leave it out, or pass sharding_strategy="HYBRID_SHARD"'
            raise ConfigError(explain("shard_size", self.shard_size, rule, fix))

    @property
    def frees_parameters(self) -> bool:
        """Whether whole parameters are there only while they are used."""
        return self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def keeps_gradients(self) -> bool:
        """Whether each rank keeps the memory of whole gradients."""
        return self.sharding_strategy in ("SHARD_OPTIMIZER", "NO_SHARD")

    def shard_ranks(self, ranks: int) -> int:
        """Return over how many of `ranks` ranks one copy is cut.

        Raises ConfigError if shard_size does not divide the ranks.
        """
        if self.sharding_strategy == "NO_SHARD":
            return 1
        if self.shard_size is None:
            return ranks
        if ranks % self.shard_size:
            fits = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
            rule = f"it must divide the {ranks} ranks"
            raise ConfigError(explain("shard_size", self.shard_size, rule, f"One of: {fits}"))
        return self.shard_size


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ConfigError unless the value is one of those allowed."""
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        rule = f"it must be one of {', '.join(map(str, allowed))}"
        raise ConfigError(explain(name, value, rule, "Choose one of them"))


def _is_count(value: Any, least: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= least


def check_offload(config: FsdpConfig, device: str, rank: int) -> None:
    """Say once, on rank 0, that there is nothing to offload; raise ConfigError on a GPU."""
    if not config.cpu_offload:
        return
    if device != "cpu":
        rule, fix = "it works for runs on the CPU in this version", "Pass cpu_offload=False"
        raise ConfigError(explain("cpu_offload", True, rule, fix))
    if rank == 0 and "offload" not in _said:
        _said.add("offload")
        text = "cpu_offload: the parameters are in host memory already, there is nothing to offload"
        warnings.warn(text, NothingToOffloadWarning, stacklevel=3)
