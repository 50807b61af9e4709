"""Does a model fit into this machine's memory?  A lower bound, so that nothing possible is refused.

A rank holds its parameters, their gradients and AdamW's two moments, cut over the tp and pp ranks,
and of one micro-batch what backward needs:

    parameters   vocab d + layers (2 d d + 2 d d kv/heads + (2 or 3) d hidden)     over tp and pp
    activations  tokens of a micro-batch x (layers (4 d + hidden/tp) + 2 vocab/tp)   over pp

hidden counts experts/ep times for parameters, top_k times for activations; what is recomputed
counts as d a layer.

Sharding over n = dp cp ranks (ZeRO) leaves 1/n of the moments, from stage 2 on of the gradients,
and in stage 3 of the parameters.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as as_dtype

if TYPE_CHECKING:
    from mpipar.train.config import TrainConfig

CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def needed(config: "TrainConfig", dp: int) -> int:
    """Return the least bytes that each rank needs; `dp` data-parallel ranks."""
    d, parts = config.dim, config.tp * config.pp
    stored, computed = as_dtype(config.dtype).itemsize, compute_dtype(as_dtype(config.dtype))
    matrices = 3 if config.model == "llama" else 2  # of the feed-forward layer
    attention = 2 * d * d + 2 * d * d * config.kv // config.heads
    mlp = config.shared + config.ffn * (config.experts // config.ep if config.experts else 1)
    block = attention + matrices * d * mlp
    parameters = (config.vocab * d + config.layers * (block + config.experts * d)) // parts
    rows = -(-config.batch // (dp * config.accumulate))
    if config.pp > 1:
        rows = max(1, rows // config.through_pipeline(dp))
    inner = (config.shared + config.ffn * (config.chosen if config.experts else 1)) // config.tp
    each = d if config.recompute else 4 * d + inner
    width = (config.layers * each + 2 * config.vocab // config.tp) // (
        config.pp * (config.tp if config.sequence_parallel else 1)
    )
    drawn = 8 * config.batch // dp + 8 * config.sample  # places of sequences, tokens of the sample
    stage = 0 if config.fsdp == "none" else int(config.fsdp)
    n = dp * config.cp
    weights = stored / (n if stage == 3 else 1) + stored / (n if stage >= 2 else 1)
    bytes_each = weights + 2 * max(4, stored) / (n if stage else 1)
    activations = rows * config.seq // config.cp * width * computed.itemsize
    return int(parameters * bytes_each) + activations + drawn


def available() -> int | None:
    """Return the bytes of this machine's memory, or of its control group; None if not known."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        return min(whole, int(CONTROL_GROUP.read_text()))
    except (OSError, ValueError):  # "max", or no control groups
        return whole


def amount(bytes: int) -> str:
    """Return bytes as "12.5 GB"."""
    for power, unit in ((5, "PB"), (4, "TB"), (3, "GB"), (2, "MB")):
        if bytes >= 1000**power:
            return f"{min(bytes, 10**40) / 1000**power:.3g} {unit}"
    return f"{bytes:,} bytes"
