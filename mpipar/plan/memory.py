"""The bytes of a rank by part: weights, gradients, optimiser, activations, buffers.

    fsdp        weights   gradients                       optimiser        buffers
    none        P         P                               2 M
    1           P         P                               2 M / n
    2           P         P/n, or P if accumulated        2 M / n          1 block and the rest
    3           P/n       as 2                            2 M / n          the same once more

P: the bytes of the parameters of this rank's stages, cut over tp; M: in the optimiser's dtype
(float32 for 16 bits, which add a float32 copy); n = dp x cp.  Parameters of fewer than 1000
elements are never sharded; many small blocks take two buffers by turns, as parallel/fsdp/unit.py
says; messages have buffers besides.  ZeRO: Rajbhandari et al. 2020.

Activations are what the tape keeps (`saved`) of the micro-batches that the pipeline's schedule has
in flight, and the gradients of the block that backward is in; with recomputation that is a block's
input, and one block at a time in full.  The numbers are those of the rank that needs most.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mpipar.arrays import dtype as as_dtype
from mpipar.models.config import ModelConfig
from mpipar.plan import saved
from mpipar.plan.layout import Job, Layout
from mpipar.plan.models import Weight, stage_weights
from mpipar.schedule.pipeline import PipelineSchedule

CALLS = 1 << 20  # that prepared calls of a few bytes keep (comm/persistent.py)
ROUND, DIRECT_RANKS = 1 << 18, 32  # of what is scattered (parallel/fsdp/links.py)
BUCKET = 25 << 20  # of gradients on their way at a time (FsdpConfig.bucket_mb)
SMALL = 1000  # elements of a parameter that is not sharded (FsdpConfig.min_param_size)
SPARE = 0.025  # of what a rank keeps: a second buffer for blocks may take so much (fsdp/unit.py)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


class Holding(NamedTuple):
    """The parameters of a rank of the pipeline: all of them, those too small to be sharded, the
    largest block, what is in no block, the number of blocks."""

    whole: int
    small: int
    block: int
    rest: int
    blocks: int


def memory(job: Job, layout: Layout) -> Memory:
    """Return what the rank that needs most holds."""
    kept = _activations(job, layout)
    totals = []
    for held, activations in zip(holdings(job, layout), kept, strict=True):
        weights, gradients, optimizer, buffers = shares(held, job, layout)
        buffers += _messages(held, job, layout)
        totals.append(Memory(weights, gradients, optimizer, activations, buffers))
    return max(totals, key=lambda one: one.total)


def holdings(job: Job, layout: Layout) -> tuple[Holding, ...]:
    """Return what the ranks of the pipeline hold of the model."""
    return _holdings(job.model, layout.tp, layout.layers(job), layout.pipeline.placement)


@lru_cache(4096)
def _holdings(
    config: ModelConfig, tp: int, layers: tuple[int, ...], placement: tuple[int, ...]
) -> tuple[Holding, ...]:
    groups: list[list[list[Weight]]] = [[] for _ in range(max(placement) + 1)]
    rests: list[list[Weight]] = [[] for _ in groups]
    for stage, rank in enumerate(placement):
        ends = stage == 0, stage == len(placement) - 1
        blocks, rest = stage_weights(config, layers[stage], *ends, tp)
        groups[rank] += blocks
        rests[rank] += rest
    return tuple(map(_holding, groups, rests))


def _holding(blocks: list[list[Weight]], rest: list[Weight]) -> Holding:
    sizes = [weight.size for group in (*blocks, rest) for weight in group]
    return Holding(
        sum(sizes),
        sum(size for size in sizes if size < SMALL),
        max((sum(weight.size for weight in block) for block in blocks), default=0),
        sum(weight.size for weight in rest),
        len(blocks),
    )


def largest(job: Job, layout: Layout) -> Holding:
    """Return what the rank of the pipeline with most parameters holds."""
    return max(holdings(job, layout), key=lambda held: held.whole)


def updated(held: Holding, layout: Layout) -> float:
    """Return the parameters that the optimiser of a rank updates."""
    if not layout.fsdp:
        return held.whole
    return held.small + (held.whole - held.small) / layout.plane


def shares(held: Holding, job: Job, layout: Layout) -> tuple[float, float, float, float]:
    """Return bytes of weights, gradients, optimiser and buffers of a rank."""
    item = as_dtype(job.model.dtype).itemsize
    shard = updated(held, layout)
    kept = 4 * held.blocks * held.block / layout.plane  # values, gradients and two moments
    gathered = (1 + (held.block <= SPARE * kept)) * held.block + held.rest
    summed = (1 + (2 * held.block <= SPARE * kept)) * held.block + held.rest  # gradients
    adds_up = layout.microbatches > 1  # gradients stay whole until the last micro-batch
    cut = layout.fsdp >= 2 and not adds_up
    buffers = cut * summed + (layout.fsdp == 3) * gathered
    weights = shard if layout.fsdp == 3 else held.whole
    gradients = shard if cut else held.whole
    return weights * item, gradients * item, shard * optimizer_bytes(job), buffers * item


def _messages(held: Holding, job: Job, layout: Layout) -> float:
    """Return the bytes that messages are received in, or wait in to be sent.

    Activations over tp (one) and pp (one each way); over dp x cp what many small calls keep, and of
    gradients that are scattered two rounds of a few ranks, or a block of many.
    """
    item = as_dtype(job.model.dtype).itemsize
    activation = layout.tokens(job) * job.model.dim * item
    found = float(activation) if layout.tp > 1 else 0.0
    if layout.pp > 1:
        found += 2 * activation / (layout.tp if layout.sequence_parallel else 1)
    if layout.plane > 1:
        found += CALLS
    if layout.fsdp:
        few = layout.plane <= DIRECT_RANKS
        found += 2 * ROUND if few else min(BUCKET, held.block * item) / layout.plane
    return found


def optimizer_bytes(job: Job) -> int:
    """Return the bytes of the optimiser's state for each parameter."""
    item = as_dtype(job.model.dtype).itemsize
    wide = max(4, item)
    master = 4 if item == 2 else 0
    return master + (2 * wide if job.optimizer == "adamw" else 0)


def _activations(job: Job, layout: Layout) -> list[float]:
    """Return the bytes of activations of each rank of the pipeline, at their peak."""
    tokens = layout.tokens(job)
    neutral = replace(layout, dp=1, fsdp=0, cp=min(layout.cp, 2))  # what does not matter here
    return [tokens * each for each in _peaks(job, neutral)]


@lru_cache(4096)
def _peaks(job: Job, layout: Layout) -> tuple[float, ...]:
    """Return the most bytes that each rank of the pipeline keeps for a token of a micro-batch."""
    config, schedule = job.model, layout.pipeline

    def each(kept: Iterable[saved.Kept]) -> float:
        return saved.token_bytes(kept, config, layout)

    full, back = each(saved.block(config, layout)), each(saved.in_backward(config))
    block = each(saved.recomputed(config)) if layout.recompute else full
    end = each(saved.last(config, layout))
    stages = [layers * block for layers in layout.layers(job)]
    stages[0] += each(saved.first(config))
    stages[-1] += end
    found = list[float]()
    for rank, counts in enumerate(live_counts(schedule)):
        held = schedule.held(rank)
        most = max(_dot(count, [stages[stage] for stage in held]) for count in counts)
        gone = end if layout.stages - 1 in held else 0.0  # when backward comes to a block
        found.append(max(most, most - gone + back + full - block))  # what is run again, too
    return tuple(found)


def _dot(counts: tuple[int, ...], kept: list[float]) -> float:
    return sum(count * each for count, each in zip(counts, kept, strict=True))


_live: dict[int, tuple[PipelineSchedule, list[list[tuple[int, ...]]]]] = {}


def live_counts(schedule: PipelineSchedule) -> list[list[tuple[int, ...]]]:
    """Return for each rank the counts of micro-batches in flight, by stage, that may be its peak.

    A rank with one stage has one count, its highest; with several, those that no other exceeds in
    every stage.  The walk is that of `schedule.pipeline.live`.
    """
    if id(schedule) not in _live:
        counts = [_undominated(_walk(schedule, rank)) for rank in range(schedule.ranks)]
        _live[id(schedule)] = schedule, counts  # the schedule too, so that its id stays its own
    return _live[id(schedule)][1]


def _walk(schedule: PipelineSchedule, rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the micro-batches in flight of each stage after each forward pass of a rank."""
    last = "W" if schedule.split else "B"
    held = dict.fromkeys(schedule.held(rank), 0)
    for action in schedule.actions[rank]:
        if action.kind == "F":
            held[action.stage] += 1
            yield tuple(held.values())
        elif action.kind == last:
            held[action.stage] -= 1


def _undominated(counts: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for count in sorted(set(counts), reverse=True):
        if not any(all(a >= b for a, b in zip(one, count, strict=True)) for one in found):
            found.append(count)
    return found
