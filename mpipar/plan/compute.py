"""Seconds that a rank computes: forward, gradients of inputs and of weights of each stage.

    F   matrix products 2 x multiplications, attention 2 products, what works on elements
    B   as many matrix products for the gradient of the input, attention 5 products of F's 2
        (scores are computed again: Dao 2023), elements; with recomputation F once more
    W   as many matrix products for the gradient of the weights

Matrix products run at `flops`, attention at `attention_flops` (half of the scores are masked),
elements at `memory_bandwidth`, and every operation costs `overhead`.  What an operation does
to an element is counted in accesses: how much longer it takes than a third of an addition of two
arrays, as measured (kernels).  The multiplications are those of `models.stages.costs`, by which
stages are cut.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as as_dtype
from mpipar.models.config import ModelConfig
from mpipar.models.stages import costs
from mpipar.plan.layout import Job, Layout
from mpipar.plan.machine import Machine
from mpipar.plan.saved import BETWEEN, INSIDE

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
ATTENTION_PRODUCTS = FORWARD_PRODUCTS + BACKWARD_PRODUCTS
BLOCK_OPERATIONS, END_OPERATIONS = 20, 8  # that are recorded for a block, and for the two ends
# accesses to each element, forward and backward
NORM, GELU, ADD, BIAS = (2.3, 3.2), (2.9, 4.3), (2.8, 2.8), (2.5, 1.6)
ADAMW, SGD = 7, 5  # accesses to each parameter of a step, with the norm for clipping


def MEASURED(dim: int, hidden: int) -> float:
    """Return the accesses for a token of what `machine.measure` runs."""
    return (sum(NORM) + ADD[0]) * dim + sum(GELU) * hidden


class Work(NamedTuple):
    """What works on elements: how many a token has, accesses to each forward and backward."""

    name: str
    elements: float
    accesses: tuple[float, float]
    place: str = BETWEEN


def block_work(config: ModelConfig) -> Iterator[Work]:
    """Yield what a block does with elements."""
    d, kv, hidden = config.dim, config.kv_heads * config.head_dim, config.hidden
    yield Work("norm1, norm2", 2 * d, NORM)
    yield Work("adding to the residual stream, and its gradients", 2 * d, ADD)
    if config.model == "gpt2":
        yield Work("biases of qkv and up", d + 2 * kv + hidden, BIAS, INSIDE)
        yield Work("biases of projection and down", 2 * d, BIAS)
        yield Work("gelu", hidden, GELU, INSIDE)
    else:
        yield Work("rotary", d + kv, (2.3, 2.5), INSIDE)
        yield Work(
            "swiglu, of halves that are made solid and joined again", hidden, (12, 30), INSIDE
        )


def first_work(config: ModelConfig) -> Iterator[Work]:
    """Yield what the embeddings do."""
    yield Work("embedding", config.dim, (1.5, 1.7))


def last_work(config: ModelConfig) -> Iterator[Work]:
    """Yield what the last norm and the loss do."""
    yield Work("norm", config.dim, NORM)
    yield Work("cross_entropy", config.vocab, (4.5, 2.8), INSIDE)


@dataclass(frozen=True)
class Seconds:
    """Of a micro-batch in one stage; attention: the part of forward that is attention."""

    forward: float
    backward: float
    weight: float
    attention: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.weight


class Cut(NamedTuple):
    """What of a layout matters to the seconds of a stage."""

    tokens: int
    tp: int
    sequence_parallel: bool
    recompute: bool


def stages(job: Job, layout: Layout, machine: Machine) -> list[Seconds]:
    """Return the seconds of every stage for one micro-batch, without communication."""
    cut = Cut(layout.tokens(job), layout.tp, layout.sequence_parallel, layout.recompute)
    last = layout.stages - 1
    return [
        _stage(job.model, machine, cut, layers, number == 0, number == last)
        for number, layers in enumerate(layout.layers(job))
    ]


@lru_cache(1 << 16)
def _stage(
    config: ModelConfig, machine: Machine, cut: Cut, layers: int, first: bool, last: bool
) -> Seconds:
    tokens = cut.tokens
    block, head = costs(config)
    pairs = float(config.seq * config.dim)  # multiplications of attention for a token, in `block`
    products = 2 * tokens * layers * (block - pairs) / cut.tp / machine.flops
    ends = 2 * tokens * last * head / cut.tp / machine.flops
    attention = 2 * tokens * layers * pairs / cut.tp / machine.attention_flops
    python = (layers * BLOCK_OPERATIONS + (first + last) * END_OPERATIONS) * machine.overhead
    scale = tokens * compute_dtype(as_dtype(config.dtype)).itemsize / machine.memory_bandwidth
    blocks = [scale * layers * _accesses(block_work(config), cut, way) for way in (0, 1)]
    outer = [work for there, some in ((first, first_work), (last, last_work)) if there
             for work in some(config)]  # fmt: skip
    others = [scale * _accesses(outer, cut, way) for way in (0, 1)]
    once = products + attention + blocks[0]  # what recomputation runs again
    back = products + ends + attention * BACKWARD_PRODUCTS / FORWARD_PRODUCTS
    return Seconds(
        forward=once + ends + others[0] + python,
        backward=back + blocks[1] + others[1] + python + cut.recompute * (once + python),
        weight=products + ends,
        attention=attention,
    )


def _accesses(work: Iterable[Work], cut: Cut, way: int) -> float:
    """Return the accesses that a rank has for a token, forward (0) or backward (1)."""
    ranks = {BETWEEN: cut.tp if cut.sequence_parallel else 1, INSIDE: cut.tp}
    return sum(one.elements * one.accesses[way] / ranks[one.place] for one in work)


def optimizer(job: Job, parameters: float, machine: Machine) -> float:
    """Return the seconds that clipping and the optimiser take for so many parameters of a rank."""
    item = max(4, as_dtype(job.model.dtype).itemsize)
    accesses = ADAMW if job.optimizer == "adamw" else SGD
    return parameters * item * accesses / machine.memory_bandwidth


def flops_per_token(config: ModelConfig) -> float:
    """Return the arithmetic of a token's forward and backward, as MFU counts it: 6 N + 6 L s d."""
    block, head = costs(config)
    return 6.0 * (config.layers * block + head)
