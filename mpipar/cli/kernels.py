"""`mpipar bench kernels`: what is asked of it, its table and its file."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from mpipar.bench import kernels, kernels_compiled, kernels_device
from mpipar.cli import files
from mpipar.errors import ConfigError, explain
from mpipar.kernels.device_cache import modules
from mpipar.train import terminal


def run(names: tuple[str, ...], seconds: float, path: Path | None, device: str = "cpu") -> int:
    """Measure on one thread, or on a GPU, print and write; returns the exit code.

    Raises ConfigError for a name that is none, for no seconds, and for a GPU that there is not.
    """
    files.check(path, "json")
    there = kernels.names(device)
    for name in names:
        if name not in there:
            rule = f"it must be one of {', '.join(there)}"
            raise ConfigError(explain("names", name, rule, "Choose among them"))
    if not seconds > 0:
        rule = "it must be above 0"
        raise ConfigError(explain("seconds", seconds, rule, "Pass 0.3"))
    if device == "cuda":
        by_type, rows = kernels_device.measure(names, seconds)
        copy = next(iter(by_type.values())).copy
        rated = {f"product_flops_{name}": rates.product for name, rates in by_type.items()}
        said = [f"{name} product {rates.product / 1e12:.1f}" for name, rates in by_type.items()]
        said = [f"copy {copy / 1e9:,.0f} GB/s", f"{', '.join(said)} TFLOP/s"]
        show_device(f"{'; '.join(said)}; ratio: time over the larger floor", rows)
    else:
        with threadpool_limits(1):
            rates, rows = kernels.measure(names, seconds)
        copy = rates.copy
        rated = {"product_flops": rates.product, "exponentials_per_s": rates.exponential}
        show(rates, rows)
    if path is not None:
        machine = {"copy_bytes_per_s": copy, **rated}
        words = json.dumps({"machine": machine, "rows": kernels.as_json(rows)}, indent=1) + "\n"
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
    Console(force_terminal=columns is not None, width=columns or 150).print(table)
    if path is not None:
        words = json.dumps({"machine": {}, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        files.write(path, words, "json")
    return int(any(row.stack or row.spills for row in rows))


def show(rates: Any, rows: list[Any]) -> None:
    """Print the kernels of the CPU as a table."""
    title = (
        f"copy {rates.copy / 1e9:.1f} GB/s, product {rates.product / 1e9:.0f} GFLOP/s, "
        f"exp {rates.exponential / 1e9:.2f} G/s; ratio: time over floor"
    )
    cells = [
        (
            *named(row), ms(row.median_s), ms(row.floor_s), f"{row.ratio:.2f}",
            f"{row.ns_per_element:.3f}", "" if row.gflops is None else f"{row.gflops:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    table(title, ("time", "floor", "ratio", "ns/element", "GFLOP/s"), cells)


def show_device(title: str, rows: list[Any]) -> None:
    """Print the kernels of a GPU as a table."""
    cells = [
        (
            *named(row), ms(row.median_s), ms(row.bytes_floor_s),
            ms(row.operations_floor_s) if row.operations_floor_s else "", f"{row.ratio:.2f}",
            *(("", "") if row.plain_s is None else (ms(row.plain_s), f"{row.of_plain:.0%}")),
        )
        for row in rows
    ]  # fmt: skip
    table(title, ("time", "bytes", "operations", "ratio", "CuPy", "CuPy/ours"), cells)


def named(row: Any) -> tuple[str, ...]:
    """Return the first cells of a row."""
    return row.kernel, row.device, row.dtype, "x".join(map(str, row.shape))


def ms(seconds: float) -> str:
    """Return a time for a table."""
    return f"{seconds * 1e3:.3f} ms"


def table(title: str, numbers: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    """Print kernels with their numbers."""
    made = Table(title=title)
    for name in ("", "device", "dtype", "shape"):
        made.add_column(name, no_wrap=True)
    for name in numbers:
        made.add_column(name, justify="right")
    for row in cells:
        made.add_row(*row)
    columns = terminal.width()
    Console(force_terminal=columns is not None, width=columns or 140).print(made)
