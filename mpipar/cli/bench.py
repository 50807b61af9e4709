"""`mpipar bench`: measure this machine, beside the peer in the same run.

mpiexec -n 2 mpipar bench collectives --json collectives.json
mpiexec -n 4 mpipar bench collectives --tune
mpiexec -n 2 mpipar bench collectives --algorithms window --peer torch
mpipar bench overhead
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpipar.errors import ConfigError, explain

SIZES = (4, 64, 1024, 16384, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


@dataclass(frozen=True)
class Collectives:
    """Time our schedules beside the MPI library's collectives on float32 arrays; run by mpiexec."""

    names: tuple[
        Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"], ...
    ] = ("all_reduce",)
    """Collectives to time."""
    sizes: tuple[int, ...] = SIZES
    """Bytes of the whole vector."""
    algorithms: tuple[str, ...] = ()
    """Algorithms to time; all if none is named.  "window": all_reduce in node-shared memory."""
    peer: Literal["torch"] | None = None
    """Time torch's gloo all_reduce too, where torch is installed."""
    json: Path | None = None
    """Write {"machine": ..., "rows": [...]} here."""
    tune: bool = False
    """Write the table that "auto" reads from now on."""


@dataclass(frozen=True)
class Overhead:
    """Time the tape's cost an operation, and the cost of `import mpipar`."""

    json: Path | None = None
    """Write {"machine": ..., "rows": [...]} here."""


Config = Collectives | Overhead
ALONE = (Overhead,)


def run(config: Collectives | Overhead) -> int:
    """Run one benchmark; returns the exit code."""
    return _collectives(config) if isinstance(config, Collectives) else _overhead(config)


def _collectives(config: Collectives) -> int:
    from mpi4py import MPI

    from mpipar.bench import collectives, gloo, timing
    from mpipar.comm import choice
    from mpipar.parallel.communicator import Communicator

    with Communicator(MPI.COMM_WORLD, name="bench") as comm, ExitStack() as stack:
        if comm.size == 1:
            raise ConfigError(
                explain(
                    "ranks", 1, "collectives must have peers", "Start mpiexec -n 2 mpipar bench"
                )
            )
        if comm.rank == 0:
            print("median times; ratio: the MPI library's time over ours, above 1 is faster")
        peer = None
        if config.peer is not None and gloo.available(MPI.COMM_WORLD):
            peer = stack.enter_context(gloo.all_reduce(MPI.COMM_WORLD))
        elif config.peer is not None and comm.rank == 0:
            print("torch is not installed: its rows are left out", flush=True)
        rows: list[collectives.Row] = []
        for name in config.names:
            for nbytes in config.sizes:
                others = {gloo.NAME: peer(nbytes // 4)} if peer and name == "all_reduce" else {}
                rows += collectives.measure(comm, name, nbytes, config.algorithms, others=others)
                if comm.rank == 0:
                    _print_rows(rows[-1].bytes, name, rows)
        if comm.rank == 0:
            machine = timing.machine(MPI.COMM_WORLD)
            _write(config.json, machine, collectives.as_json(rows))
            if config.tune:
                path = choice.table_path()
                table = choice.read_table(path)
                choice.write_table(path, choice.Table(table.rows | collectives.tune(rows).rows))
                print(f"wrote {path}")
    return 0


def _print_rows(nbytes: int, name: str, rows: list[Any]) -> None:
    print(f"{name}, {nbytes} bytes, {rows[-1].ranks} ranks", flush=True)
    for row in rows:
        if (row.collective, row.bytes) == (name, nbytes):
            print(
                f"  {row.algorithm:20} {row.median_s * 1e6:12.1f} us"
                f"   library {row.mpi_median_s * 1e6:12.1f} us   ratio {row.ratio:6.2f}",
                flush=True,
            )


def _overhead(config: Overhead) -> int:
    from mpipar.bench import overhead

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
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"wrote {path}")
