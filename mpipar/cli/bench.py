"""`mpipar bench`: measure this machine, beside the peer in the same run.

mpiexec -n 2 mpipar bench collectives --json collectives.json
mpiexec -n 4 mpipar bench collectives --tune
mpiexec -n 2 mpipar bench collectives --algorithms window --peer torch
mpiexec -n 2 mpipar bench train --peer torch --json train.json
mpiexec -n 2 mpipar bench pipeline --microbatches 8
mpiexec -n 4 mpipar bench checkpoint --size 1GiB
mpipar bench kernels --json kernels.json
mpipar bench overhead
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from mpipar.bench.train_settings import Train
from mpipar.bench.train_settings import check as check_train
from mpipar.cli import files
from mpipar.cli.checkpoints import Checkpoint
from mpipar.cli.train import HEAD_START, fail
from mpipar.errors import ConfigError, MpiparError, explain
from mpipar.train import launch, memory

SIZES = (4, 64, 1024, 16384, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


@dataclass(frozen=True)
class Collectives:
    """Time our schedules beside the MPI library's collectives on float32 arrays; run by mpiexec."""

    names: tuple[
        Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"], ...
    ] = ("all_reduce",)
    """Collectives to time."""
    sizes: tuple[int, ...] = SIZES
    """Bytes of the whole vector, multiples of 4."""
    algorithms: tuple[str, ...] = ()
    """Algorithms to time; all if none is named.  "window": all_reduce in node-shared memory."""
    peer: Annotated[Literal["torch"] | None, arg(metavar="torch")] = None
    """Time torch's gloo all_reduce too, where torch is installed."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""
    tune: bool = False
    """Write the table that "auto" reads from now on."""


@dataclass(frozen=True)
class Overhead:
    """Time the tape's cost an operation, and the cost of `import mpipar`."""

    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""


@dataclass(frozen=True)
class Pipeline:
    """Run pipeline schedules; the ranks' idle share beside the simulated one; run by mpiexec."""

    schedules: tuple[Literal["gpipe", "1f1b", "interleaved", "zb1p", "zbv"], ...] = (
        *("gpipe", "1f1b", "interleaved", "zb1p", "zbv"),
    )
    """Schedules to run."""
    microbatches: int = 8
    """Micro-batches of a step."""
    dim: int = 512
    """Features of the layers, two square ones a stage."""
    rows: int = 256
    """Rows of a micro-batch."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""


@dataclass(frozen=True)
class Kernels:
    """Time the kernels, one thread or a GPU, beside the least time that this machine could take.

    floor: the largest of bytes over the rate of a copy, operations over the best rate of a product,
    and, on the CPU, exponentials over the rate of exp. ratio: time over floor.
    """

    names: tuple[str, ...] = ()
    """Kernels to time; all if none is named."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: the CUDA kernels, beside CuPy's own ways (of products: cuBLAS)."""
    seconds: float = 0.3
    """For each kernel."""
    compile_only: bool = False
    """Compile the CUDA kernels for two architectures instead, and show what each takes: registers,
    shared memory, and what did not fit. No GPU is needed, but the extra compile-cuda is; names are
    then those of kernels' modules."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""


Config = Collectives | Train | Pipeline | Checkpoint | Kernels | Overhead
ALONE = (Kernels, Overhead)


def run(config: Config) -> int:
    """Run one benchmark; returns the exit code."""
    if isinstance(config, Overhead):
        return _overhead(config)
    if isinstance(config, Kernels):
        from mpipar.cli import kernels

        if config.compile_only:
            return kernels.compile_only(config.names, config.json)
        return kernels.run(config.names, config.seconds, config.json, config.device)
    if isinstance(config, Pipeline):
        return _on_all_ranks(config, lambda world: _pipeline(config, world))
    if isinstance(config, Checkpoint):
        return _on_all_ranks(config, lambda world: _checkpoint(config, world))
    if isinstance(config, Train):
        return _on_all_ranks(config, lambda world: _train(config, world))
    return _on_all_ranks(config, lambda world: _collectives(config, world))


def _on_all_ranks(config: Config, work: Callable[[Any], None]) -> int:
    """Collective: run `work` on the world, or tell on rank 0 what all ranks cannot do."""
    if trouble := launch.start():
        return fail(trouble, launch.first_of_job(), lambda: time.sleep(HEAD_START))
    from mpi4py import MPI

    from mpipar.train.agree import is_of_all_ranks, same

    world = MPI.COMM_WORLD
    try:
        same(world, "the configuration", repr(config), "Start all ranks with the same flags.")
        work(world)
    except MpiparError as error:
        if not is_of_all_ranks(error):
            raise
        return fail(str(error), world.rank == 0, world.Barrier)
    return 0


def _collectives(config: Collectives, world: Any) -> None:
    """Collective: measure, print and write."""
    from mpi4py import MPI

    from mpipar.train.agree import together

    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    local = neighbours.size
    neighbours.Free()
    together(world, lambda: check(config, world.rank, world.size, local))
    rows = _measured(config, world)
    together(world, lambda: _write_results(config, world.rank, rows))


def _needs_peers(ranks: int, what: str) -> None:
    """Raise ConfigError for a benchmark of messages on one rank."""
    if ranks == 1:
        fix = f"Start mpiexec -n 2 mpipar bench {what}"
        raise ConfigError(explain("ranks", 1, f"bench {what} must have peers", fix))


def check(config: Collectives, rank: int, ranks: int, local: int) -> None:
    """Raise ConfigError for what cannot be measured by `ranks` ranks, `local` on this machine."""
    from mpipar.bench.collectives import WINDOW
    from mpipar.comm import choice
    from mpipar.comm.calls import algorithms

    _needs_peers(ranks, "collectives")
    for flag in ("names", "sizes"):
        if not getattr(config, flag):
            raise ConfigError(explain(flag, (), "there must be one at least", "Leave it out"))
    have = memory.available()
    for size in config.sizes:
        if size < 4 or size % 4:
            rule = "the bytes of float32 values must be a multiple of 4, and at least 4"
            raise ConfigError(explain("sizes", size, rule, f"Pass {max(4, size // 4 * 4)}"))
        need = 3 * size * local
        if have is not None and need > have:
            rule = (
                f"the arrays of {local} ranks take about {memory.amount(need)}, and this machine "
                f"has {memory.amount(have)}"
            )
            raise ConfigError(explain("sizes", size, rule, "Pass a smaller one"))
    known = dict.fromkeys(["auto"] + [one for name in config.names for one in algorithms(name)])
    if "all_reduce" in config.names:
        known[WINDOW] = None
    for algorithm in config.algorithms:
        if algorithm not in known:
            rule = f"{', '.join(config.names)} can be measured with {', '.join(known)}"
            raise ConfigError(explain("algorithms", algorithm, rule, "Choose among them"))
    if rank == 0:  # which writes
        files.check(config.json, "json")
        if config.tune:
            path = choice.table_path()
            with _told_as_config_error(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            files.check(path, "MPIPAR_TUNING")
            choice.read_table(path)


def _measured(config: Collectives, world: Any) -> list[Any]:
    """Collective: measure everything; rank 0 prints it."""
    from mpipar.bench import collectives, gloo
    from mpipar.parallel.communicator import Communicator

    rows: list[collectives.Row] = []
    with Communicator(world, name="bench") as comm, ExitStack() as stack:
        if comm.rank == 0:
            print("median times; ratio: the MPI library's time over ours, above 1 is faster")
        peer = None
        if config.peer is not None and gloo.available(world):
            peer = stack.enter_context(gloo.all_reduce(world))
        elif config.peer is not None and comm.rank == 0:
            print("torch is not installed: its rows are left out", flush=True)
        for name in config.names:
            for nbytes in config.sizes:
                others = {gloo.NAME: peer(nbytes // 4)} if peer and name == "all_reduce" else {}
                found = collectives.measure(comm, name, nbytes, config.algorithms, others=others)
                rows += found
                if comm.rank == 0:
                    _print_rows(nbytes, name, comm.size, found)
    return rows


def _write_results(config: Collectives, rank: int, rows: list[Any]) -> None:
    from mpi4py import MPI

    from mpipar.bench import collectives, timing
    from mpipar.comm import choice

    if rank != 0:
        return
    _write(config.json, timing.machine(MPI.COMM_WORLD), collectives.as_json(rows))
    if config.tune:
        path = choice.table_path()
        table = choice.read_table(path)
        with _told_as_config_error(path):
            choice.write_table(path, choice.Table(table.rows | collectives.tune(rows).rows))
        print(f"wrote {path}")


@contextmanager
def _told_as_config_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule = f"the table cannot be written ({error.strerror or error})"
        fix = "Set MPIPAR_TUNING to another path"
        raise ConfigError(explain("MPIPAR_TUNING", str(path), rule, fix)) from None


def _print_rows(nbytes: int, name: str, ranks: int, rows: list[Any]) -> None:
    print(f"{name}, {nbytes} bytes, {ranks} ranks", flush=True)
    for row in rows:
        print(
            f"  {row.algorithm:20} {row.median_s * 1e6:12.1f} us"
            f"   library {row.mpi_median_s * 1e6:12.1f} us   ratio {row.ratio:6.2f}",
            flush=True,
        )
    if not rows:
        print("  none of the algorithms can be measured here", flush=True)


def _train(config: Train, world: Any) -> None:
    """Collective: measure every mode, print and write."""
    os.environ["MPIPAR_BLAS_THREADS"] = str(config.threads)  # read by the first Communicator
    from mpipar.bench import timing, train
    from mpipar.parallel.communicator import Communicator
    from mpipar.train.agree import together

    def check() -> None:
        check_train(config)
        if world.rank == 0:  # which writes
            files.check(config.json, "json")

    together(world, check)
    rows = []
    with Communicator(world, name="bench") as comm:
        for mode in config.modes:
            rows.append(train.measure(config, comm, mode))
    if world.rank == 0:
        _print_train(rows)
        _write(config.json, timing.machine(world), train.as_json(rows))


def _print_train(rows: list[Any]) -> None:
    """Print what a person wants to see of the rows, as a table."""
    from rich.console import Console
    from rich.table import Table

    from mpipar.train import terminal

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    table = Table(title="training, all ranks together; ratio: our tokens a second over the peer's")
    for name in ("", "tokens/s", "peer", "ratio", "MFU", "alone", "overhead", "RSS MB", "peer MB"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(
            f"{row.mode}, {row.ranks} ranks, dim {row.dim}",
            number(row.tokens_per_s, ",.0f"),
            number(row.peer_tokens_per_s, ",.0f"),
            number(row.ratio, ".2f"),
            number(row.mfu, ".0%"),
            number(row.single_tokens_per_s, ",.0f"),
            number(row.overhead, "+.1%"),
            number(row.rss_mb, ",.0f"),
            number(row.peer_rss_mb, ",.0f"),
        )
    columns = terminal.width()  # Open MPI's ranks write to a terminal of their own
    Console(force_terminal=columns is not None, width=columns or 110).print(table)


def _pipeline(config: Pipeline, world: Any) -> None:
    """Collective: measure every schedule, print and write."""
    from mpipar.bench import pipeline, timing
    from mpipar.parallel.communicator import Communicator
    from mpipar.train.agree import together

    def check() -> None:
        _needs_peers(world.size, "pipeline")
        for flag in ("microbatches", "dim", "rows"):
            if getattr(config, flag) < 1:
                value = getattr(config, flag)
                raise ConfigError(explain(flag, value, "it must be at least 1", "Pass more"))
        if world.rank == 0:  # which writes
            files.check(config.json, "json")

    together(world, check)
    rows = []
    with Communicator(world, name="bench") as comm:
        for name in config.schedules:
            row = pipeline.measure(comm, name, config.microbatches, config.dim, config.rows)
            rows.append(row)
            if comm.rank == 0:
                print(
                    f"{name:12} {row.step_s * 1e3:9.1f} ms   idle {row.idle:6.1%}"
                    f"   simulated {row.simulated_idle:6.1%}   ratio {row.ratio:5.2f}"
                    f"   without messages {row.plain_idle:6.1%}",
                    flush=True,
                )
    if world.rank == 0:
        _write(config.json, timing.machine(world), pipeline.as_json(rows))


def _checkpoint(config: Checkpoint, world: Any) -> None:
    """Collective: measure, print and write."""
    from mpipar.bench import checkpoint, timing
    from mpipar.cli import checkpoints

    rows = checkpoints.measured(config, world)
    if world.rank == 0:
        _write(config.json, timing.machine(world), checkpoint.as_json(rows))


def _overhead(config: Overhead) -> int:
    from mpipar.bench import overhead

    files.check(config.json, "json")
    taped, plain = overhead.tape_seconds()
    mpipar, base = overhead.import_seconds()
    rows = [
        {"name": "tape, an operation", "median_s": taped, "base_s": plain},
        {"name": "import mpipar", "median_s": mpipar, "base_s": base},
    ]
    for row in rows:
        extra = row["median_s"] - row["base_s"]  # type: ignore[operator]
        print(f"{row['name']:20} {row['median_s']:.3e} s, {extra:.3e} s over the base")
    _write(config.json, {}, rows)
    return 0


def _write(path: Path | None, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if path is not None:
        words = json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        files.write(path, words, "json")
