"""`mpipar bench kernels`: what is asked of it, its table and its file."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from mpipar.bench import kernels, kernels_compiled
from mpipar.cli import files
from mpipar.errors import ConfigError, explain
from mpipar.kernels.device_cache import modules
from mpipar.train import terminal


def run(names: tuple[str, ...], seconds: float, path: Path | None) -> int:
    """Measure on one thread, print and write; returns the exit code.

    Raises ConfigError for a name that is none, and for no seconds.
    """
    files.check(path, "json")
    for name in names:
        if name not in kernels.names():
            rule = f"it must be one of {', '.join(kernels.names())}"
            raise ConfigError(explain("names", name, rule, "Choose among them"))
    if not seconds > 0:
        rule = "it must be above 0"
        raise ConfigError(explain("seconds", seconds, rule, "Pass 0.3"))
    with threadpool_limits(1):
        rates, rows = kernels.measure(names, seconds)
    show(rates, rows)
    rated = {"copy_bytes_per_s": rates.copy, "product_flops": rates.product}
    rated |= {"exponentials_per_s": rates.exponential}
    if path is not None:
        words = json.dumps({"machine": rated, "rows": kernels.as_json(rows)}, indent=1) + "\n"
        files.write(path, words, "json")
    return 0


def compile_only(names: tuple[str, ...], path: Path | None) -> int:
    """Compile the CUDA kernels, print what each takes and write it; returns the exit code: 1 if
    some have a stack or spills.

    Raises ConfigError for a name that is no module with kernels, and without the compiler.
    """
    files.check(path, "json")
    there = modules()
    for name in names:
        if name not in there:
            rule = f"it must be one of {', '.join(there)}"
            raise ConfigError(explain("names", name, rule, "Choose among them"))
    rows, seconds = kernels_compiled.measure(only=names)
    heads = [field.name for field in fields(kernels_compiled.Compiled)]
    table = Table(title=f"{len(rows)} versions in {seconds:.0f} s; sizes in bytes")
    for head in heads:
        table.add_column(head, justify="left" if head in ("kernel", "target") else "right")
    for row in rows:
        table.add_row(*(str(getattr(row, head)) for head in heads))
    columns = terminal.width()
    Console(force_terminal=columns is not None, width=columns or 120).print(table)
    if path is not None:
        words = json.dumps({"machine": {}, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        files.write(path, words, "json")
    return int(any(row.stack or row.spills for row in rows))


def show(rates: Any, rows: list[Any]) -> None:
    """Print the kernels as a table."""
    title = (
        f"copy {rates.copy / 1e9:.1f} GB/s, product {rates.product / 1e9:.0f} GFLOP/s, "
        f"exp {rates.exponential / 1e9:.2f} G/s; ratio: time over floor"
    )
    table = Table(title=title)
    for name in ("", "device", "dtype", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "floor", "ratio", "ns/element", "GFLOP/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kernel,
            row.device,
            row.dtype,
            "x".join(map(str, row.shape)),
            f"{row.median_s * 1e3:.3f} ms",
            f"{row.floor_s * 1e3:.3f} ms",
            f"{row.ratio:.2f}",
            f"{row.ns_per_element:.3f}",
            "" if row.gflops is None else f"{row.gflops:.0f}",
        )
    columns = terminal.width()
    Console(force_terminal=columns is not None, width=columns or 120).print(table)
