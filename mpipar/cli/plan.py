"""`mpipar plan`: on which meshes does a model fit, how much memory does it take, how fast is it?

    mpipar plan --model llama-7b --ranks 64 --nodes 8 --memory 24GB
    mpipar plan --layers 24 --dim 2048 --heads 16 --ranks 16 --memory 16GB --pp 4
    mpipar plan --measure --machine here.json --ranks 4 --memory 2GB
    mpiexec -n 4 mpipar plan --check --tp 2 --batch 16

Nothing is trained and no MPI is needed, but for --check, which runs the best layout for a few steps
and shows measured beside predicted.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from mpipar.cli.files import check, write
from mpipar.cli.limits import CHUNKS
from mpipar.cli.schedule import byte_count, node_sizes
from mpipar.errors import ConfigError, explain
from mpipar.models.config import ModelConfig
from mpipar.train import launch, terminal
from mpipar.train.memory import amount

if TYPE_CHECKING:
    from mpipar.plan.communication import Links
    from mpipar.plan.layout import Job
    from mpipar.plan.machine import Machine
    from mpipar.plan.search import Plan

Count = Annotated[int | None, arg(metavar="INT")]
Number = Annotated[float | None, arg(metavar="FLOAT")]
FilePath = Annotated[Path | None, arg(metavar="PATH")]
PINNED = (
    *("pp", "dp", "cp", "tp", "schedule", "chunks", "microbatches", "cp_layout"),
    *("sequence_parallel", "recompute"),
)  # flags that the search takes as they are
ALONE = ()
WIDTH = 120  # of the tables where they are not read on a terminal


@dataclass(frozen=True)
class Config:
    """List the meshes that a model fits on, fastest first: memory a rank by part, communication a
    step by axis, idle share of the pipeline, time of a step."""

    model: str = "gpt2"
    """gpt2 or llama, or one by name: gpt2-124m, -355m, -774m, -1.5b; llama-7b, -13b, -70b;
    llama3-8b, -70b, -405b."""
    layers: Count = None
    """Transformer blocks, and below other sizes, where they are not those of the model's name."""
    dim: Count = None
    """Width of the residual stream."""
    heads: Count = None
    """Attention heads."""
    kv_heads: Count = None
    """Heads of keys and values."""
    hidden: Count = None
    """Width of the feed-forward layer."""
    vocab: Count = None
    """Different tokens."""
    seq: Count = None
    """Tokens of a sequence."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the parameters."""
    batch: Count = None
    """Sequences of a step, over all ranks together; four a rank if not given."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Whose state is kept."""

    ranks: int = 8
    """Ranks of the job."""
    nodes: Annotated[str, arg(metavar="LIST")] = "8"
    """Ranks of each node: 2,2, or 8 for as many on every node."""
    shared: bool = False
    """The ranks of a node share one link to the other nodes."""
    memory: str = "16GB"
    """Bytes that a rank has: 24GB, 512MiB."""

    pp: Count = None
    """Pipeline ranks, and below other settings of mpipar train: those given are not searched."""
    dp: Count = None
    """Data-parallel ranks."""
    cp: Count = None
    """Context-parallel ranks."""
    tp: Count = None
    """Tensor-parallel ranks."""
    fsdp: Literal["none", "1", "2", "3"] | None = None
    """What is sharded over the data-parallel ranks."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb1p", "zbv"] | None = None
    """Of the pipeline."""
    chunks: Count = None
    """Stages on each pipeline rank, for interleaved."""
    microbatches: Count = None
    """Parts of a rank's sequences, one after the other."""
    cp_layout: Literal["zigzag", "ulysses"] | None = None
    """How a sequence lies on the context-parallel ranks."""
    sequence_parallel: bool | None = None
    """Cut norms and the residual stream over the tensor-parallel ranks."""
    recompute: bool | None = None
    """Keep only the inputs of each block, and run it again in backward."""

    machine: FilePath = None
    """File with the speeds of a rank; written with --measure."""
    measure: bool = False
    """Measure this machine's speeds for the model's sizes, about a second."""
    flops: Number = None
    """Operations a second of matrix products on a rank, and below other speeds."""
    attention_flops: Number = None
    """Operations a second of attention, of those that a causal mask leaves."""
    memory_bandwidth: Number = None
    """Bytes a second of element-by-element operations, every access counted."""
    overhead: Number = None
    """Seconds that an operation costs beside its arithmetic."""
    alpha: Number = None
    """Seconds a message between nodes."""
    beta: Number = None
    """Seconds a byte between nodes."""
    gamma: Number = None
    """Seconds a byte that is added."""
    alpha_intra: Number = None
    """Seconds a message inside a node."""
    beta_intra: Number = None
    """Seconds a byte inside a node."""
    cores: Number = None
    """Cores of a node, which its ranks share, and which copy messages inside it; if not given, one
    a rank, and messages that travel beside its work."""

    top: int = 10
    """Meshes to show."""
    json: FilePath = None
    """Write everything to this file; - for standard output, without the table."""
    check: bool = False
    """Run a few steps of the best layout on the ranks of this job, at speeds that are measured, and
    show memory and time beside those predicted."""


MOST_LAYERS = 10_000


def run(config: Config) -> int:
    """Plan, print, and write what is asked for; return the exit code."""
    if config.check:
        return _check(config)
    if not launch.first_of_job():
        return 0
    from mpipar.plan import machine
    from mpipar.plan.communication import Links
    from mpipar.plan.search import search

    job = job_of(config, config.ranks)
    speeds = machine_of(config)
    to_stdout = config.json == Path("-")
    check(None if to_stdout else config.json, "json")
    if config.measure:
        speeds = _measured(job, speeds)
        if config.machine is not None:
            machine.write(config.machine, speeds)
    nodes = node_sizes(config.nodes, config.ranks) or (config.ranks,)
    links = Links(speeds, config.ranks, nodes, config.shared)
    plans = search(job, links, byte_count("memory", config.memory), pinned(config), config.top)
    if config.json is not None:
        text = json.dumps(document(job, links, plans), indent=1)
        if to_stdout:
            print(text)
            return 0
        write(config.json, text + "\n", "json")
    _show(config, job, plans)
    return 0


def _measured(job: "Job", speeds: "Machine") -> "Machine":
    """Return the speeds of one core of this machine."""
    from threadpoolctl import threadpool_limits

    from mpipar.kernels.native import compile_cpu
    from mpipar.plan import machine
    from mpipar.train import heap

    heap.keep_freed()  # as in training
    compile_cpu()
    with threadpool_limits(1):
        return machine.measure(job.model, speeds)


def job_of(config: Config, ranks: int) -> "Job":
    """Return the job; ConfigError for sizes that cannot be."""
    from mpipar.plan import models
    from mpipar.plan.layout import Job

    if not 1 <= ranks <= CHUNKS:
        rule = f"a job has 1 to {CHUNKS:,}"
        raise ConfigError(explain("ranks", ranks, rule, "Pass --ranks 8"))
    if config.cores is not None and not config.cores > 0:
        rule = "a node has at least one"
        raise ConfigError(explain("cores", config.cores, rule, "Leave it out for one a rank"))
    if config.top < 1:
        raise ConfigError(explain("top", config.top, "it is at least 1", "Pass --top 10"))
    if config.chunks is not None and config.chunks < 1:
        rule = "a rank has at least one stage"
        raise ConfigError(explain("chunks", config.chunks, rule, "Pass --chunks 2"))
    sizes = models.sizes(config.model)
    own = ("layers", "dim", "heads", "kv_heads", "hidden", "vocab", "seq")
    given = {name: getattr(config, name) for name in own if getattr(config, name) is not None}
    if ("dim" in given or "heads" in given) and config.model in models.NAMED:
        sizes = {key: size for key, size in sizes.items() if key not in ("hidden", "kv_heads")}
    if given.get("kv_heads") and sizes["model"] == "gpt2":
        rule = "only llama groups its queries"
        raise ConfigError(
            explain("kv_heads", given["kv_heads"], rule, "Leave it out, or pass --model llama")
        )
    if given.get("kv_heads") == 0:
        raise ConfigError(explain("kv_heads", 0, "it is at least 1", "Leave it out, or pass 1"))
    if given.get("layers", 0) > MOST_LAYERS:
        rule = f"each is looked at, at most {MOST_LAYERS:,}"
        raise ConfigError(explain("layers", given["layers"], rule, "Pass fewer"))
    model = ModelConfig(**{**sizes, **given, "dtype": config.dtype})
    batch = 4 * ranks if config.batch is None else config.batch
    return Job(model, batch, config.optimizer)


def machine_of(config: Config) -> "Machine":
    """Return the machine of the file, if it is to be read, with the speeds that are given."""
    from mpipar.plan import machine

    known = [field.name for field in fields(machine.Machine)]
    given = {name: getattr(config, name) for name in known if getattr(config, name) is not None}
    read = config.machine is not None and not config.measure
    base = machine.read(config.machine) if read and config.machine else machine.Machine()
    return replace(base, **given)


def pinned(config: Config) -> dict[str, Any]:
    """Return the settings that are not searched."""
    found = {name: getattr(config, name) for name in PINNED}
    if config.fsdp is not None:
        found["fsdp"] = 0 if config.fsdp == "none" else int(config.fsdp)
    return found


def document(job: "Job", links: "Links", plans: "list[Plan]") -> dict[str, Any]:
    """Return what --json writes."""
    from mpipar.plan.models import parameters

    return {
        "model": {**asdict(job.model), "parameters": parameters(job.model)},
        "batch": job.batch,
        "optimizer": job.optimizer,
        "ranks": links.ranks,
        "machine": asdict(links.machine),
        "rows": [plan.row() for plan in plans],
    }


def _show(config: Config, job: "Job", plans: "list[Plan]") -> None:
    """Print the tables: memory, then times."""
    from rich.console import Console
    from rich.table import Table

    from mpipar.plan.models import parameters
    from mpipar.schedule.draw_timeline import seconds

    columns = terminal.width()
    console = Console(force_terminal=columns is not None, width=columns or WIDTH)
    model = job.model
    console.print(
        f"{config.model}: {parameters(model) / 1e6:,.1f} M parameters, {model.layers} layers of "
        f"{model.dim}; {job.batch} sequences of {model.seq} a step on {config.ranks} ranks; "
        f"{config.memory} a rank"
    )
    table = Table(title="Memory of the rank that needs most", title_justify="left")
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    for number, plan in enumerate(plans, 1):
        parts = [amount(round(getattr(plan.memory, name))) for name in names]
        table.add_row(f"{number}", *parts)
    times = Table(title="A step", title_justify="left")
    axes = ("pp", "dp", "cp", "tp")
    for name in ("", "compute", *axes, "bubble", "step", "tokens/s", "MFU"):
        times.add_column(name, justify="right" if name else "left")
    for number, plan in enumerate(plans, 1):
        sent = [
            f"{amount(round(cost.sent))} {seconds(cost.seconds)}" if cost.sent else "-"
            for cost in (plan.axes[axis] for axis in axes)
        ]
        times.add_row(
            f"{number}",
            seconds(plan.compute),
            *sent,
            f"{100 * plan.bubble:.1f} %",
            seconds(plan.step),
            f"{plan.tokens_per_s:,.0f}",
            f"{100 * plan.mfu:.0f} %",
        )
    for number, plan in enumerate(plans, 1):
        console.print(f"{number:3}  {plan.layout.flags() or 'one rank'}", highlight=False)
    console.print(table)
    console.print(times)


def _check(config: Config) -> int:
    """Collective: run the best layout for a few steps; print measured beside predicted."""
    if trouble := launch.start():
        raise ConfigError(trouble)
    from mpi4py import MPI

    from mpipar.plan.check import check as measured
    from mpipar.plan.check import measured_machine
    from mpipar.plan.communication import Links
    from mpipar.plan.layout import Layout
    from mpipar.plan.search import search

    world = MPI.COMM_WORLD
    job = job_of(config, world.size)
    speeds = measured_machine(job, Layout(dp=world.size), world)
    links = Links(speeds, world.size, world.size)
    layout = search(job, links, byte_count("memory", config.memory), pinned(config), 1)[0].layout
    found = measured(job, layout, world, speeds, again=True)
    if world.rank == 0:
        print(
            f"{layout.flags() or 'one rank'}\n{'':22}{'predicted':>12}{'measured':>12}{'ratio':>8}"
        )
        for name, predicted, measure in found:
            ratio = measure / predicted
            print(f"{name:22}{predicted:>12.4g}{measure:>12.4g}{ratio:>8.3f}")
    return 0
