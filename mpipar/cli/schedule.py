"""`mpipar schedule`: look at collective algorithms and pipelines, prove them, see what they cost.

    mpipar schedule show all_reduce/ring -p 4
    mpipar schedule verify all -p 1..64
    mpipar schedule simulate all_reduce -p 1024 --bytes 64MiB --nodes 8
    mpipar schedule draw all_reduce/ring -p 4 --svg ring.svg
    mpipar schedule show 1f1b -p 4 -m 8
    mpipar schedule draw --trace runs/trace

None of them needs MPI.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from mpipar.cli import limits, pipelines
from mpipar.cli.files import check, write
from mpipar.errors import ConfigError, ScheduleError, explain
from mpipar.schedule import CommSchedule, algorithms, cut, draw, generators, make, simulate
from mpipar.schedule.draw_timeline import seconds
from mpipar.schedule.network import CLUSTER, Network, bus_bandwidth
from mpipar.schedule.pipeline import PIPELINES
from mpipar.schedule.simulate import Result

Name = Annotated[str, Positional]
OutputPath = Annotated[Path | None, arg(metavar="PATH")]
Microbatches = Annotated[int, arg(aliases=["-m"])]


@dataclass(frozen=True)
class Show:
    """Show who sends which chunk to whom, round by round; of a pipeline, who runs what when."""

    name: Name
    """all_reduce/ring, or all_reduce for all its algorithms; 1f1b, or pipeline for all pipeline
    schedules, or a CSV file of one."""
    ranks: Annotated[int, arg(aliases=["-p"])] = 4
    """Ranks of the group."""
    svg: OutputPath = None
    """Write the picture to this file."""
    segments: int = 1
    """Parts that every chunk is cut into; of two levels, parts of the vector."""
    root: int = 0
    """Root of broadcast, reduce, gather and scatter."""
    offset: int = 1
    """Distance of a shift."""
    nodes: Annotated[str | None, arg(metavar="LIST")] = None
    """Ranks of each node, for hierarchical algorithms: 2,2, or 8 for as many on every node."""
    microbatches: Microbatches = 8
    """Micro-batches of a pipeline."""
    chunks: Annotated[int | None, arg(metavar="INT")] = None
    """Stages of a pipeline on each rank, for interleaved; 2 if not given."""
    csv: OutputPath = None
    """Write the pipeline's schedule to this file."""
    width: int = 96
    """Longest line of the picture, in characters."""


@dataclass(frozen=True)
class Verify:
    """Prove that algorithms are right: every message meets its receive, nothing waits for ever,
    and the result is exactly the collective's.  Exit code 1 if one is not.

    The table counts several schedules for each number of ranks: with chunks whole and cut in two,
    and for those that have them, several roots, distances and layouts of nodes; of a pipeline, each
    number of micro-batches and of chunks."""

    name: Name = "all"
    """all_reduce/ring, all_reduce for all its algorithms, or all of all collectives; 1f1b, or
    pipeline for all pipeline schedules, or a CSV file of one."""
    ranks: Annotated[str, arg(aliases=["-p"])] = "1..16"
    """Ranks of the group: 8, or 1..64, or 1..8,16,32."""
    microbatches: Annotated[str, arg(aliases=["-m"])] = "1..8,16"
    """Micro-batches of a pipeline, as ranks are given."""
    chunks: Annotated[int | None, arg(metavar="INT")] = None
    """Stages of a pipeline on each rank, for interleaved; 1, 2 and 3 if not given."""
    jobs: Annotated[int | None, arg(metavar="INT")] = None
    """Processes to share the work; the available cores if not given."""


@dataclass(frozen=True)
class _Simulated:
    name: Name
    """all_reduce/ring, or all_reduce for all its algorithms; 1f1b, or pipeline for all pipeline
    schedules, or a CSV file of one."""
    ranks: Annotated[int, arg(aliases=["-p"])] = 4
    """Ranks of the group."""
    bytes: str = "64MiB"
    """Bytes of the whole vector: 65536, 64MiB, 1e9, 4kB."""
    nodes: Annotated[str | None, arg(metavar="LIST")] = None
    """Ranks of each node: 2,2, or 8 for as many on every node. If not given, as many as a power of
    two up to 4 divides the ranks."""
    segments: int = 1
    """Parts that every chunk is cut into; of two levels, parts of the vector."""
    root: int = 0
    """Root of broadcast, reduce, gather and scatter."""
    offset: int = 1
    """Distance of a shift."""
    alpha: float = CLUSTER.alpha
    """Seconds a message between nodes."""
    beta: float = CLUSTER.beta
    """Seconds a byte between nodes."""
    gamma: float = CLUSTER.gamma
    """Seconds a byte that is added."""
    alpha_intra: float = CLUSTER.alpha_intra
    """Seconds a message inside a node."""
    beta_intra: float = CLUSTER.beta_intra
    """Seconds a byte inside a node."""
    shared: bool = False
    """The ranks of a node share one link to the other nodes."""
    microbatches: Microbatches = 8
    """Micro-batches of a pipeline."""
    chunks: Annotated[int | None, arg(metavar="INT")] = None
    """Stages of a pipeline on each rank, for interleaved; 2 if not given."""
    forward: float = 1.0
    """Seconds that a pipeline's rank needs for the forward pass of a micro-batch."""
    backward: float = 1.0
    """Seconds for the gradient of its input."""
    weight: float = 1.0
    """Seconds for the gradients of its weights."""
    send: float = 0.0
    """Seconds that a message between stages is on its way."""


@dataclass(frozen=True)
class Simulate(_Simulated):
    """Say what algorithms cost on a network of two levels (alpha-beta-gamma model), or how long a
    pipeline takes and how long its ranks are idle."""


@dataclass(frozen=True)
class Draw(_Simulated):
    """Draw when each rank sends, receives and adds, or runs what, in simulated time; of a traced
    training with --pp, the measured time below it."""

    name: Name = ""
    """all_reduce/ring; 1f1b, or a CSV file of a pipeline's schedule; nothing with --trace."""
    trace: Annotated[Path | None, arg(metavar="PATH")] = None
    """Folder of mpipar train --trace, or the file in it, whose pipeline is drawn."""
    step: Annotated[int | None, arg(metavar="INT")] = None
    """Step of the trace; the last one if not given."""
    svg: OutputPath = None
    """Write the chart to this file."""
    width: int = 96
    """Longest line of the chart, in characters."""


Config = Show | Verify | Simulate | Draw
ALONE = (Show, Verify, Simulate, Draw)


def run(config: Config) -> int:
    """Run one of the subcommands; return the exit code."""
    for flag in ("svg", "csv"):
        check(getattr(config, flag, None), flag)
    if isinstance(config, Draw) and (config.trace or config.step is not None):
        limits.check_width(config.width)
        asked = config.name, config.trace, config.step
        return pipelines.compare(*asked, config.width, config.svg)
    if pipelines.is_pipeline(config.name):
        return _run_pipeline(config)
    match config:
        case Show():
            return _show(config)
        case Verify():
            from mpipar.cli.prove import prove

            chosen, counts = names(config.name), rank_counts(config.ranks)
            limits.check_jobs(config.jobs)
            limits.check_proof(counts, len(chosen))
            return prove(chosen, counts, config.jobs)
        case Draw():
            return _draw(config)
        case Simulate():
            return _simulate(config)


def _run_pipeline(config: Config) -> int:
    if isinstance(config, Verify):
        microbatches = rank_counts(config.microbatches, "microbatches")
        ranks = rank_counts(config.ranks)
        limits.check_jobs(config.jobs)
        limits.check_pipeline_proof(ranks, microbatches, config.chunks)
        return pipelines.prove(config.name, ranks, microbatches, config.chunks)
    sizes = config.name, config.ranks, config.microbatches, config.chunks
    most = limits.SIMULATED if isinstance(config, Simulate) else limits.DRAWN
    limits.check_actions(*sizes[1:], most)
    if not isinstance(config, Simulate):
        limits.check_width(config.width)
    if isinstance(config, Show):
        return pipelines.show(*sizes, config.width, config.svg, config.csv)
    _check_times(config, "forward", "backward", "weight", "send")
    times = pipelines.Times(config.forward, config.backward, config.weight, config.send)
    if isinstance(config, Draw):
        return pipelines.chart(*sizes, times, config.width, config.svg)
    return pipelines.cost(*sizes, times)


def names(name: str) -> list[tuple[str, str]]:
    """Return (collective, algorithm) of all that `name` names.

    Raises ConfigError for a collective or algorithm that does not exist.
    """
    if name == "all":
        return [(c, algorithm) for c in generators for algorithm in algorithms(c, shared=True)]
    collective, _, algorithm = name.partition("/")
    if collective not in generators:
        kinds = f"the collectives are {', '.join(generators)}; the pipelines {', '.join(PIPELINES)}"
        raise ConfigError(explain("collective", collective, kinds, "Choose one of them"))
    known = algorithms(collective, shared=True)
    if not algorithm:
        return [(collective, one) for one in known]
    if algorithm not in known:
        rule = f"{collective} has the algorithms {', '.join(known)}"
        raise ConfigError(explain("name", name, rule, f"Say {collective}/{known[0]}, for example"))
    return [(collective, algorithm)]


def rank_counts(text: str, what: str = "ranks") -> list[int]:
    """Return the rank counts that `8`, `1..64` or `1..8,16,32` names; ConfigError for others."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            rule = "they are numbers from 1 up, or ranges of them"
            raise ConfigError(explain(what, text, rule, "Say 8, or 1..64, or 1..8,16,32"))
        if last > limits.CHUNKS:
            rule = f"no number is above {limits.CHUNKS:,}"
            raise ConfigError(explain(what, text, rule, "Say lower ones"))
        counts += range(first, last + 1)
    return counts


def byte_count(what: str, text: str, least: int = 0) -> float:
    """Return the bytes that `65536`, `64MiB`, `4kB` or `1e9` names, as the value of `what`.

    Raises ConfigError for others, and for less than `least`.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)", text.strip().lower())
    size = float(found[1]) * units.get(found[2], math.nan) if found else math.nan
    if not (math.isfinite(size) and size >= least):
        rule = f"it must be a number of bytes{f', at least {least}' * (least > 0)}"
        raise ConfigError(explain(what, text, rule, "Say 64MiB, or 65536"))
    return size


def _check_times(config: _Simulated, *flags: str) -> None:
    limits.check_finite(**{flag: getattr(config, flag) for flag in flags})


def node_sizes(text: str | None, p: int) -> tuple[int, ...] | None:
    """Return the ranks of each node that `2,2` or `8` (on every node) names; None for None."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        rule = "it is the ranks of each node"
        raise ConfigError(explain("nodes", text, rule, "Say 2,2 or 8"))
    sizes = tuple(int(size) for size in text.split(","))
    return Network(nodes=sizes if len(sizes) > 1 else sizes[0]).layout(p)


def _schedule(
    config: Show | _Simulated, collective: str, algorithm: str, nodes: tuple[int, ...] | None
) -> CommSchedule:
    schedule = make(
        collective,
        algorithm,
        config.ranks,
        root=config.root,
        offset=config.offset,
        nodes=nodes,
    )
    return cut(schedule, config.segments)


def _show(config: Show) -> int:
    chosen = names(config.name)
    limits.check_ranks(config.ranks, config.segments)
    limits.check_width(config.width)
    nodes = node_sizes(config.nodes, config.ranks)
    if config.svg is not None:
        chosen = [_only(chosen)]
    schedules = [_schedule(config, *one, nodes) for one in chosen]
    for schedule in schedules:
        limits.check_drawn(schedule)
    if config.svg is not None:
        write(config.svg, draw(schedules[0], "svg"), "svg")
        return 0
    for number, schedule in enumerate(schedules):
        print("\n" * (number > 0) + generators[schedule.collective][schedule.algorithm].about)
        print(draw(schedule, width=config.width))
    return 0


def _network(config: _Simulated) -> Network:
    limits.check_ranks(config.ranks, config.segments)
    _check_times(config, "alpha", "beta", "gamma", "alpha_intra", "beta_intra")
    sizes = node_sizes(config.nodes, config.ranks)
    if sizes is None:
        sizes = Network(nodes=next(n for n in (4, 2, 1) if config.ranks % n == 0)).layout(
            config.ranks
        )
    return Network(
        alpha=config.alpha,
        beta=config.beta,
        gamma=config.gamma,
        alpha_intra=config.alpha_intra,
        beta_intra=config.beta_intra,
        nodes=sizes,
        shared=config.shared,
    )


def _simulate(config: Simulate) -> int:
    chosen, network = names(config.name), _network(config)
    nbytes = byte_count("bytes", config.bytes)
    nodes = network.layout(config.ranks)
    schedules = [_schedule(config, *one, nodes) for one in chosen]
    failed: list[ScheduleError] = []
    first = True
    for schedule in schedules:
        try:
            result = simulate(schedule, nbytes, network, spans=0)
        except ScheduleError as error:
            failed.append(error)
            continue
        if first:
            print(_headline(config, network))
            print(f"\n{'':30}{'time':>10}{'busbw':>12}{'messages':>18}{'sent by a rank':>18}")
        first = False
        print(_row(schedule, nbytes, result), flush=True)
    if failed and len(failed) == len(chosen):
        raise failed[0]
    for reason in failed:
        print(f"not simulated: {reason}")
    return 0


def _headline(config: _Simulated, network: Network) -> str:
    sizes = network.layout(config.ranks)
    each = str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    nodes = f"{len(sizes):,} nodes of {each}" if len(sizes) > 1 else "1 node"
    return (
        f"{config.name} of {config.bytes} on {limits.plural(config.ranks, 'rank')}, {nodes}: alpha "
        f"{seconds(network.alpha)} between nodes and {seconds(network.alpha_intra)} inside, "
        f"{_rate(network.beta)} and {_rate(network.beta_intra)}, additions {_rate(network.gamma)}"
    )


def _rate(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:.3g} GB/s" if seconds_a_byte else "for free"


def _row(schedule: CommSchedule, nbytes: float, result: Result) -> str:
    rate = bus_bandwidth(schedule.collective, nbytes, schedule.ranks, result.makespan)
    return (
        f"{schedule.name:30}{seconds(result.makespan):>10}{rate / 1e9:>7.3g} GB/s"
        f"{result.messages:>18,}{result.bytes_sent_max / 2**20:>14.4g} MiB"
    )


def _draw(config: Draw) -> int:
    collective, algorithm = _only(names(config.name))
    limits.check_width(config.width)
    network = _network(config)
    schedule = _schedule(config, collective, algorithm, network.layout(config.ranks))
    full = config.ranks <= 32
    result = simulate(schedule, byte_count("bytes", config.bytes), network, full=full)
    ranks = limits.plural(config.ranks, "rank")
    title = f"{schedule.name} of {config.bytes} on {ranks}: {seconds(result.makespan)}"
    if config.svg is None:
        print(f"{title}\n\n{draw(result.timeline, width=config.width)}")
    else:
        write(config.svg, draw(result.timeline, "svg", title=title), "svg")
    return 0


def _only(chosen: list[tuple[str, str]]) -> tuple[str, str]:
    if len(chosen) > 1:
        collective, algorithm = chosen[0]
        rule = "one picture shows one algorithm"
        raise ConfigError(explain("name", collective, rule, f"Say {collective}/{algorithm}"))
    return chosen[0]
