"""`mpipar bench checkpoint`: what is asked of it, and its table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from mpipar.cli import files
from mpipar.cli.schedule import byte_count
from mpipar.errors import ConfigError, explain
from mpipar.train import memory, terminal


@dataclass(frozen=True)
class Checkpoint:
    """Time a checkpoint that all ranks save and load, beside one process and a plain file of the
    same size, synced to disk too; started by mpiexec.

    ratio: our bytes a second over the plain ones. extra: the most memory that a rank takes beside
    its arrays, in MiB.
    """

    size: str = "256MiB"
    """Bytes of the file."""
    cuts: tuple[Literal["rows", "columns"], ...] = ("rows", "columns")
    """How matrices are cut over the ranks; a rank's part of a file is one range, or many."""
    repeats: int = 5
    """Turns that each side gets; medians count."""
    dir: Annotated[Path, arg(metavar="PATH")] = Path()
    """Folder on the disk that is measured; what is written there is deleted."""
    json: Annotated[Path | None, arg(metavar="PATH")] = None
    """Write {"machine": ..., "rows": [...]} here."""


def check(config: Checkpoint) -> None:
    """Raise ConfigError for what cannot be measured."""
    size, have = byte_count("size", config.size, least=1), memory.available()
    if have is not None and size > have / 2:
        rule = f"the arrays take as much memory, and this machine has {memory.amount(have)}"
        raise ConfigError(explain("size", config.size, rule, "Pass a smaller one"))
    if config.repeats < 1 or not config.cuts:
        name = "cuts" if config.repeats > 0 else "repeats"
        given = getattr(config, name)
        raise ConfigError(explain(name, given, "there must be one at least", "Leave it out"))


def measured(config: Checkpoint, world: Any) -> list[Any]:
    """Collective: measure every cut; rank 0 prints the table."""
    from mpipar.bench import checkpoint
    from mpipar.parallel.communicator import Communicator
    from mpipar.train.agree import together

    def ready() -> None:
        check(config)
        if world.rank == 0:  # which writes
            files.check(config.json, "json")
            checkpoint.check_room(config.dir, int(byte_count("size", config.size)))

    together(world, ready)
    rows, nbytes = [], int(byte_count("size", config.size))
    with (
        Communicator(world, name="bench") as comm,
        checkpoint.workplace(comm, config.dir) as folder,
    ):
        for cut in config.cuts:
            rows.append(checkpoint.measure(comm, cut, nbytes, config.repeats, folder))
    if world.rank == 0:
        _show(rows)
    return rows


def _show(rows: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = "a checkpoint, all ranks together; ratio: our bytes a second over one plain process's"
    table = Table(title=title)
    for name in ("", "MiB", "", "MiB/s", "plain", "ratio", "extra MiB a rank"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        mib = row.bytes / 2**20
        for what in ("write", "read"):
            seconds, plain = getattr(row, f"{what}_s"), getattr(row, f"plain_{what}_s")
            table.add_row(
                f"{row.ranks} ranks, cut by {row.cut}" if what == "write" else "",
                f"{mib:,.0f}",
                what,
                f"{mib / seconds:,.0f}",
                f"{mib / plain:,.0f}",
                f"{plain / seconds:.2f}",
                f"{getattr(row, f'{what}_extra_mb'):.1f}",
            )
    columns = terminal.width()
    Console(force_terminal=columns is not None, width=columns or 110).print(table)
