"""The layouts of a job that fit into memory, fastest first.

For every mesh (pp, dp, cp, tp) its best settings: FSDP stage, schedule, micro-batches, sequence
parallelism, recomputation.  The time of a step is

    makespan of the pipeline's schedule          F, B, W of every stage with what tp and cp send
    + gradients and parameters over dp x cp      as far as computing does not hide them
    + tied embeddings, small sums, the optimiser

Where ranks share a core, each has it for a part of the time: all of that takes as much longer, but
for what other ranks do while one waits for the pipeline.

Layouts are taken by a lower bound, their arithmetic alone, and the search ends when no layout that
is left can be among those asked for: the result is that of trying all.
"""

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mpipar.arrays import dtype as as_dtype
from mpipar.errors import ConfigError, explain
from mpipar.plan import communication, compute
from mpipar.plan.communication import Cost, Links, stage_traffic
from mpipar.plan.layout import Job, Layout, layouts
from mpipar.plan.machine import Machine
from mpipar.plan.memory import Memory, largest, memory, updated
from mpipar.schedule import pipeline
from mpipar.train.memory import amount


@dataclass(frozen=True)
class Plan:
    """What a layout is expected to do.

    axes: by name, the bytes that a rank sends in a step and their seconds.  compute: seconds of
    arithmetic of the busiest rank; exposed: seconds of dp that nothing hides; bubble: share of
    ranks x makespan of the pipeline in which nothing runs; step: seconds; mfu: of `flops`.
    """

    layout: Layout
    memory: Memory
    axes: dict[str, Cost]
    compute: float
    exposed: float
    bubble: float
    step: float
    tokens_per_s: float
    mfu: float

    def row(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        communication = {
            axis: {"bytes": cost.sent, "seconds": cost.seconds} for axis, cost in self.axes.items()
        }
        found = asdict(self)
        found["layout"] = {**found["layout"], "flags": self.layout.flags()}
        found["memory"]["total"] = self.memory.total
        found["communication"] = communication
        del found["axes"]
        return found


@dataclass(frozen=True)
class Draft:
    """A layout whose pipeline is not simulated yet.

    forward, backward, weight: seconds of each stage; hop: of a message between stages; besides:
    seconds of a step outside the pipeline; turns: ranks that share a core; one_node: whether all
    ranks are on the same.  The rest is as in Plan.
    """

    layout: Layout
    axes: dict[str, Cost]
    forward: list[float]
    backward: list[float]
    weight: list[float]
    hop: float
    compute: float
    exposed: float
    besides: float
    turns: float = 1.0
    one_node: bool = True

    def bound(self) -> float:
        """Return seconds that a step takes at least.

        Before a rank's first stage can begin, and after its last backward pass, the stages before
        it have to run; weight gradients that are split may run beside those.
        """
        layout, found = self.layout, 0.0
        split = layout.pipeline.split
        for rank in range(layout.pp):
            held = layout.pipeline.held(rank)
            own = [sum(times[s] for s in held) for times in (self.forward, self.backward)]
            weight = sum(self.weight[s] for s in held)
            before = sum(self.forward[: held[0]])
            after = sum(self.backward[: held[0]])
            after += 0.0 if split else sum(self.weight[: held[0]])
            late = 0.0 if split else layout.microbatches * weight
            found = max(
                found,
                before + layout.microbatches * (sum(own) + weight),
                before + layout.microbatches * sum(own) + late + after,
            )
        return found + self.besides

    def plan(self, job: Job, machine: Machine, held: Memory) -> Plan:
        """Simulate the pipeline."""
        times = self.forward, self.backward, self.weight
        span, bubble = _makespan(self.layout, *times, self.hop)
        step = self._shared(span) + self.turns * self.besides
        speed = job.tokens / step
        peak = machine.flops * self.layout.ranks / self.turns
        mfu = speed * compute.flops_per_token(job.model) / peak
        how = self.layout, held, self.axes, self.compute, self.exposed
        return Plan(*how, bubble, step, speed, mfu)

    def _shared(self, span: float) -> float:
        """Return the seconds of the pipeline where its ranks share cores."""
        if self.turns == 1.0 or not self.one_node:
            return self.turns * span
        stages = zip(self.forward, self.backward, self.weight, strict=True)
        busy = self.layout.microbatches * (sum(map(sum, stages)) / self.layout.pp + 2 * self.hop)
        return max(span, self.turns * busy)


def predict(job: Job, layout: Layout, links: Links) -> Plan:
    """Return memory, communication and time of one layout."""
    return draft(job, layout, links).plan(job, links.machine, memory(job, layout))


def draft(job: Job, layout: Layout, links: Links) -> Draft:
    """Return what a step consists of."""
    machine, counts = links.machine, layout.microbatches
    computing = compute.stages(job, layout, machine)
    layers, end = layout.layers(job), layout.stages - 1
    keys = [(count, number == 0, number == end) for number, count in enumerate(layers)]
    traffic = {key: stage_traffic(job, layout, links, *key) for key in set(keys)}
    sends = [traffic[key] for key in keys]
    ring = layout.cp_layout == "zigzag" and not _by_hand(links, layout.cp, layout.tp)
    forward, backward = list[float](), list[float]()
    for time, sent in zip(computing, sends, strict=True):
        cover = time.attention if ring else 0.0  # the ring turns while attention is computed
        forward.append(time.forward + sent.tp[0].seconds + _beyond(sent.cp[0], cover))
        backward.append(time.backward + sent.tp[1].seconds + _beyond(sent.cp[1], 2.5 * cover))
    weight = [time.weight for time in computing]
    per_rank = [_of_rank(layout, times) for times in (forward, backward, weight)]
    most = largest(job, layout)
    nbytes = most.whole * as_dtype(job.model.dtype).itemsize
    gradients, late = communication.gradients(layout, links, nbytes)
    gathered, early = communication.gathering(layout, links, nbytes, most.blocks)
    last = max(b + w for b, w in zip(per_rank[1], per_rank[2], strict=True))
    busiest = counts * max(map(sum, zip(*per_rank, strict=True)))
    exposed = max(gradients.seconds * late, gradients.seconds - last)
    exposed += max(gathered.seconds * early, gathered.seconds - busiest)
    if _by_hand(links, layout.plane, layout.tp):
        exposed = gradients.seconds + gathered.seconds
    hop = communication.send(job, layout, links)
    tied, sums = _tied(job, layout, links), communication.small_sums(layout, links)
    adam = compute.optimizer(job, updated(most, layout), machine)
    axes = {
        "pp": hop.times(2 * counts * layout.chunks).plus(tied),
        "dp": gradients.plus(gathered),
        "cp": _most(layout, sends, "cp").times(counts),
        "tp": _most(layout, sends, "tp").times(counts),
    }
    arithmetic = counts * max(_of_rank(layout, [time.total for time in computing])) + adam
    besides = exposed + tied.seconds + sums.seconds + adam
    times = forward, backward, weight
    return Draft(
        layout,
        axes,
        *times,
        hop.seconds,
        arithmetic,
        exposed,
        besides,
        machine.turns(links.most_on_a_node),
        links.most_on_a_node == links.ranks,
    )


def _by_hand(links: Links, size: int, stride: int) -> bool:
    """Say whether the cores that compute have to copy what a group sends: then nothing hides it."""
    return links.machine.cores > 0 and len(links.layout(size, stride)) == 1


def _beyond(cost: Cost, cover: float) -> float:
    return max(0.0, cost.seconds - cover)


def _of_rank(layout: Layout, stages: list[float]) -> list[float]:
    """Add up what the stages of each rank take."""
    placement = layout.pipeline.placement
    found = [0.0] * layout.pp
    for stage, rank in enumerate(placement):
        found[rank] += stages[stage]
    return found


def _most(layout: Layout, sends: list[communication.Traffic], axis: str) -> Cost:
    """Return the traffic of a micro-batch on the rank that has most, forward and backward."""
    found = [communication.NOTHING] * layout.pp
    for stage, rank in enumerate(layout.pipeline.placement):
        forward, backward = getattr(sends[stage], axis)
        found[rank] = found[rank].plus(forward).plus(backward)
    return max(found, key=lambda cost: cost.sent)


def _makespan(
    layout: Layout, forward: list[float], backward: list[float], weight: list[float], hop: float
) -> tuple[float, float]:
    """Return the seconds of all micro-batches, and the share of them in which ranks are idle."""
    if layout.pp == 1:
        return layout.microbatches * (forward[0] + backward[0] + weight[0]), 0.0
    result = pipeline.simulate(layout.pipeline, forward, backward, weight, hop)
    return result.makespan, result.bubble


def _tied(job: Job, layout: Layout, links: Links) -> Cost:
    """Return what it costs to add the gradients of a tied embedding: first and last stage."""
    placement = layout.pipeline.placement
    if not job.model.tied or layout.pp == 1 or placement[0] == placement[-1]:
        return communication.NOTHING
    nbytes = job.model.vocab * job.model.dim * as_dtype(job.model.dtype).itemsize / layout.tp
    stride = (layout.pp - 1) * layout.plane * layout.tp
    return links.cost("all_reduce", nbytes, 2, stride)


def search(
    job: Job,
    links: Links,
    memory_bytes: float,
    fixed: Mapping[str, Any] | None = None,
    most: int = 10,
) -> list[Plan]:
    """Return the best layout of each mesh that fits, the fastest `most` of them.

    Raises ConfigError if there is no layout at all, or none that fits: then it names the one that
    is nearest.
    """
    fitting = list[_Candidate]()
    nearest: tuple[Layout, Memory] | None = None
    for layout in layouts(job, links.ranks, fixed):
        held = memory(job, layout)
        if nearest is None or held.total < nearest[1].total:
            nearest = layout, held
        if held.total <= memory_bytes:
            bound = _bound(job, layout, links.machine)
            fitting.append(_Candidate(bound, len(fitting), layout, held, None))
    if not fitting:
        assert nearest is not None, "layouts raises if there is none"
        raise ConfigError(_too_big(memory_bytes, *nearest))
    return _best(job, links, fitting, most)


class _Candidate(NamedTuple):
    """A layout that fits, by the least time it can take: its arithmetic, or that of its draft."""

    bound: float
    number: int  # of two with the same bound the first comes first
    layout: Layout
    memory: Memory
    draft: Draft | None


def _best(job: Job, links: Links, candidates: list[_Candidate], most: int) -> list[Plan]:
    """Return the best layout of each mesh, the fastest `most`, by looking at few of them."""
    heapq.heapify(candidates)
    best: dict[tuple[int, ...], Plan] = {}
    while candidates:
        bound, number, layout, held, made = heapq.heappop(candidates)
        times = sorted(plan.step for plan in best.values())
        if len(times) >= most and bound >= times[most - 1]:
            break
        mesh = layout.pp, layout.dp, layout.cp, layout.tp
        if mesh in best and bound >= best[mesh].step:
            continue
        if made is None:
            made = draft(job, layout, links)
            heapq.heappush(candidates, _Candidate(made.bound(), number, layout, held, made))
            continue
        found = made.plan(job, links.machine, held)
        if mesh not in best or found.step < best[mesh].step:
            best[mesh] = found
    return sorted(best.values(), key=lambda plan: plan.step)[:most]


def _bound(job: Job, layout: Layout, machine: Machine) -> float:
    """Return seconds that a step takes at least: the arithmetic of the busiest rank."""
    totals = [time.total for time in compute.stages(job, layout, machine)]
    return layout.microbatches * max(_of_rank(layout, totals))


def _too_big(memory_bytes: float, layout: Layout, held: Memory) -> str:
    parts = ", ".join(f"{name} {amount(int(size))}" for name, size in asdict(held).items())
    more = amount(int(held.total - memory_bytes))
    rule = (
        f"no layout fits; the nearest, {layout.flags() or 'one rank'}, needs "
        f"{amount(int(held.total))}, {more} more: {parts}"
    )
    return explain(
        "memory", amount(int(memory_bytes)), rule, "Pass more --ranks or a smaller model"
    )
