"""Bytes and seconds of every axis of the mesh, by simulating the schedules that training runs.

    tp    all_reduce of activations: 2 a block forward, 2 backward; with sequence parallelism
          all_gather and reduce_scatter: 4 forward, 6 backward (inputs are gathered once more)
    cp    keys and values round a ring: p - 1 shifts forward, twice as many backward; or heads
          traded by all_to_all, 2 forward and 2 backward (ulysses)
    pp    activations to the next stage, their gradients back
    dp    gradients summed over dp x cp once a step; sharded: scattered, and parameters gathered
          (of ZeRO-3 twice a micro-batch)

The ranks of a group lie on the nodes as a mesh of (pp, dp, cp, tp), tp fastest, puts them there:
those of tp side by side, those of pp farthest apart.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from mpipar.arrays import dtype as as_dtype
from mpipar.plan.layout import Job, Layout
from mpipar.plan.machine import Machine
from mpipar.plan.memory import BUCKET
from mpipar.schedule import make, simulate


class Cost(NamedTuple):
    """Seconds of a collective, and the bytes that the rank which sends most sends."""

    seconds: float
    sent: float

    def times(self, count: float) -> "Cost":
        """Return the cost of so many."""
        return Cost(self.seconds * count, self.sent * count)

    def plus(self, other: "Cost") -> "Cost":
        """Return both, one after the other."""
        return Cost(self.seconds + other.seconds, self.sent + other.sent)


NOTHING = Cost(0.0, 0.0)


@dataclass
class Links:
    """The network between the ranks of a job, asked for the cost of collectives, each once.

    nodes: ranks of each node, or as many on every node.  shared: all ranks of a node share its
    link to the others.
    """

    machine: Machine
    ranks: int
    nodes: int | tuple[int, ...] = 8
    shared: bool = False
    most_on_a_node: int = field(default=1, init=False)  # ranks
    _node: list[int] = field(default_factory=list, init=False, repr=False)
    _found: dict[tuple[str, float, tuple[int, ...]], Cost] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for nodes that do not add up."""
        layout = self.machine.network(self.nodes).layout(self.ranks)  # type: ignore[arg-type]
        for number, size in enumerate(layout):
            self._node += [number] * size
            self.most_on_a_node = max(self.most_on_a_node, size)

    def cost(self, collective: str, nbytes: float, size: int, stride: int = 1) -> Cost:
        """Return what a collective of `nbytes` costs ranks 0, stride, 2 stride, ...: `size` ranks.

        The algorithm is the one that communicators choose.
        """
        if size == 1 or nbytes == 0:
            return NOTHING
        where = self.layout(size, stride)
        key = collective, nbytes, where
        if key not in self._found:
            self._found[key] = self._simulated(collective, nbytes, where)
        return self._found[key]

    def layout(self, size: int, stride: int) -> tuple[int, ...]:
        """Return how many ranks of a group each node has."""
        counts: dict[int, int] = {}
        for rank in range(0, size * stride, stride):
            counts[self._node[rank]] = counts.get(self._node[rank], 0) + 1
        return tuple(counts.values())

    def message(self, nbytes: float, stride: int) -> Cost:
        """Return what a message to the rank `stride` further on costs."""
        machine = self.machine
        if stride >= self.ranks:
            return NOTHING
        if self._node[0] == self._node[stride]:
            return Cost(machine.alpha_intra + nbytes * machine.beta_intra, nbytes)
        slower = self._node.count(self._node[0]) if self.shared else 1
        return Cost(machine.alpha + nbytes * machine.beta * slower, nbytes)

    def _simulated(self, collective: str, nbytes: float, where: tuple[int, ...]) -> Cost:
        size = sum(where)
        algorithm = _choice(collective, nbytes, where)
        slower = max(self._node.count(0) / where[0], 1.0) if self.shared else 1.0
        network = self.machine.network(where, slower, self.shared)
        schedule = make(collective, algorithm, size, nodes=where)
        result = simulate(schedule, nbytes, network, spans=0)
        return Cost(result.makespan, result.bytes_sent_max)


def _choice(collective: str, nbytes: float, where: tuple[int, ...]) -> str:
    """Return the algorithm that a communicator takes, from the table of this machine if any."""
    import sys

    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False)  # to plan is no job
    from mpipar.comm import choice
    from mpipar.comm.node import Nodes

    nodes = tuple(number for number, count in enumerate(where) for _ in range(count))
    layout = Nodes(nodes, where, 0, where[0])
    algorithm = choice.choose(collective, int(nbytes), len(nodes), layout, choice.Table({}))
    return "ring" if algorithm == "mpi" else algorithm


@dataclass(frozen=True)
class Traffic:
    """What a stage sends for one micro-batch: over tp and cp, forward and backward."""

    tp: tuple[Cost, Cost]
    cp: tuple[Cost, Cost]


def stage_traffic(
    job: Job, layout: Layout, links: Links, layers: int, first: bool, last: bool
) -> Traffic:
    """Return the traffic inside a stage of so many blocks, with the ends of the model or not."""
    tp = _tensor(job, layout, links, layers, first, last)
    cp = _context(job, layout, links)
    forward, backward = (one.times(layers) for one in cp)
    if layout.recompute:
        backward = backward.plus(forward)
    return Traffic(tp, (forward, backward))


def _tensor(
    job: Job, layout: Layout, links: Links, layers: int, first: bool, last: bool
) -> tuple[Cost, Cost]:
    """Return what tensor parallelism sends forward and backward."""
    if layout.tp == 1:
        return NOTHING, NOTHING
    config, tokens = job.model, layout.tokens(job)
    item = as_dtype(config.dtype).itemsize
    size = float(tokens * config.dim * item)

    def cost(collective: str, nbytes: float = size) -> Cost:
        return links.cost(collective, nbytes, layout.tp)

    rows = cost("all_reduce", 4.0 * tokens).times(3 * last)  # maxima and sums of the loss
    if not layout.sequence_parallel:
        reduce = cost("all_reduce")
        forward = backward = reduce.times(2 * layers)
        again = forward.times(layout.recompute)
        return (
            forward.plus(reduce.times(first)).plus(rows),
            backward.plus(reduce.times(last)).plus(again),
        )
    gather, scatter = cost("all_gather"), cost("reduce_scatter")
    forward = gather.plus(scatter).times(2 * layers)
    backward = gather.times(4 * layers).plus(scatter.times(2 * layers))
    norms = cost("all_reduce", 2.0 * config.dim * item).times(2 * layers + last)
    again = forward.times(layout.recompute)
    return (
        forward.plus(scatter.times(first)).plus(gather.times(last)).plus(rows),
        backward.plus(gather.times(first + last)).plus(scatter.times(last)).plus(norms).plus(again),
    )


def _context(job: Job, layout: Layout, links: Links) -> tuple[Cost, Cost]:
    """Return what context parallelism sends for one block, forward and backward."""
    if layout.cp == 1:
        return NOTHING, NOTHING
    config = job.model
    tokens = layout.tokens(job)
    item = as_dtype(config.dtype).itemsize / layout.tp
    kv, d = config.kv_heads * config.head_dim, config.dim
    agreement = links.cost("all_gather", 80.0 * layout.cp, layout.cp, layout.tp)
    if layout.cp_layout == "ulysses":
        inputs = links.cost("all_to_all", tokens * (d + 2 * kv) * item, layout.cp, layout.tp)
        output = links.cost("all_to_all", tokens * d * item, layout.cp, layout.tp)
        both = inputs.plus(output)
        return both.plus(agreement), both
    shift = links.cost("shift", 2 * tokens * kv * item, layout.cp, layout.tp)
    ring = shift.times(layout.cp - 1)
    return ring.plus(agreement), ring.times(2)


def send(job: Job, layout: Layout, links: Links) -> Cost:
    """Return what a micro-batch costs from a stage to the next."""
    if layout.pp == 1:
        return NOTHING
    tokens = layout.tokens(job) / (layout.tp if layout.sequence_parallel else 1)
    nbytes = tokens * job.model.dim * as_dtype(job.model.dtype).itemsize
    return links.message(nbytes, layout.plane * layout.tp)


def gradients(layout: Layout, links: Links, nbytes: float) -> tuple[Cost, float]:
    """Return what summing `nbytes` of gradients costs in a step, and the share that comes last."""
    if layout.plane == 1:
        return NOTHING, 0.0
    count = max(1, ceil(nbytes / BUCKET))
    collective = "reduce_scatter" if layout.fsdp else "all_reduce"
    one = links.cost(collective, nbytes / count, layout.plane, layout.tp)
    return one.times(count), 1 / count


def gathering(layout: Layout, links: Links, nbytes: float, units: int) -> tuple[Cost, float]:
    """Return what gathering `nbytes` of parameters costs in a step, and the share that is first."""
    if layout.plane == 1 or not layout.fsdp:
        return NOTHING, 0.0
    times = 2 * layout.microbatches if layout.fsdp == 3 else 1
    one = links.cost("all_gather", nbytes / max(1, units), layout.plane, layout.tp)
    return one.times(max(1, units) * times), 1 / max(1, units * times)


def small_sums(layout: Layout, links: Links) -> Cost:
    """Return what the sums of a few numbers over all ranks cost: loss, tokens, norm, finiteness."""
    return links.cost("all_reduce", 8.0, layout.ranks).times(4)
