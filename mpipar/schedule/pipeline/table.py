"""Schedules as tables: CSV files, a row for each rank, and the table that shows where a fault is.

    0F0,0F1,0F2,,,0B0,0F3,0B1
    ,1F0,1F1,,1B0,1F2,1B1,1F3
    ,,2F0,2B0,2F1,2B1,2F2,2B2

A column is a slot of time, an empty cell a rank that waits: a spreadsheet shows the familiar
picture.  Empty cells mean nothing when a file is read; only the order in each row counts.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from mpipar.errors import ConfigError, ScheduleError, explain
from mpipar.schedule.pipeline.action import Action, parse_action, without_i
from mpipar.schedule.pipeline.core import PipelineSchedule, Row
from mpipar.schedule.pipeline.slots import slots

Cell = tuple[int, int]  # rank, place in its row
BEFORE = 5  # columns that `marked` shows before a marked cell
WIDTH = 88  # about the longest line that it returns
RANKS = 12  # rows that it shows, and those with marked cells


def to_csv(schedule: PipelineSchedule) -> str:
    """Return the schedule as CSV, a row for each rank."""
    rows: Sequence[Sequence[Action | None]] = schedule.actions
    if not schedule.lowered:
        ran = slots(schedule)
        rows = rows if ran.stuck else ran.rows
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) if action else "" for action in row] for row in rows
    )
    return out.getvalue()


def from_csv(text: str, name: str = "csv") -> PipelineSchedule:
    """Return the schedule of a CSV text; it is read, not verified.

    The stages are 0 up to the highest that is named, each on the rank with most of its actions; the
    micro-batches likewise.  Empty rows are left out.

    Raises ScheduleError for a cell that is no action, naming its row and column, for a stage
    without any action, and for a text without actions or that is no CSV.
    """
    try:
        table = [row for row in csv.reader(io.StringIO(text)) if any(map(str.strip, row))]
    except csv.Error as error:
        rule = f"it is no table: {error}"
        raise ScheduleError(explain("schedule", name, rule, "Name a CSV file")) from None
    rows = without_i([_read(name, number, row) for number, row in enumerate(table)])
    everything = [action for row in rows for action in row]
    if not everything:
        rule = "it has no actions"
        raise ScheduleError(explain("schedule", name, rule, "Write a row of them for each rank"))
    microbatches = 1 + max(action.microbatch for action in everything)
    return PipelineSchedule(name, microbatches, _placement(name, rows), rows)


def load(path: Path) -> PipelineSchedule:
    """Return the schedule of a CSV file, verified.

    Raises ConfigError if the file cannot be read, ScheduleError if the schedule is wrong.
    """
    from mpipar.schedule.pipeline.verify import verify

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        rule = f"the file cannot be read: {why}"
        raise ConfigError(explain("schedule", str(path), rule, "Name a CSV file")) from None
    schedule = from_csv(text, path.name)
    verify(schedule)
    return schedule


def _read(name: str, number: int, row: list[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row):
        if cell.strip():
            try:
                actions.append(parse_action(cell.strip()))
            except ScheduleError as error:
                where = f"{name}, row {number + 1}, column {column + 1}"
                raise ScheduleError(f"{where}: {error}") from None
    return actions


def _placement(name: str, rows: tuple[Row, ...]) -> tuple[int, ...]:
    """Return the rank of each stage: the one with most of its actions."""
    counts: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            of = counts.setdefault(action.stage, {})
            of[rank] = of.get(rank, 0) + 1
    for stage in range(len(counts)):
        if stage not in counts:
            rule = f"stage {stage} has no action, but stage {max(counts)} has"
            raise ScheduleError(explain("schedule", name, rule, "Number the stages from 0"))
    return tuple(max(counts[stage], key=counts[stage].__getitem__) for stage in range(len(counts)))


def marked(schedule: PipelineSchedule, cells: list[Cell]) -> str:
    """Return the ranks' actions in order, some cells in brackets, cut to what is near those."""
    shown = sorted({rank for rank, _ in cells} | set(range(min(schedule.ranks, RANKS))))
    middle = min((place for _, place in cells), default=0)
    width = 2 + max(len(str(action)) for row in schedule.actions for action in row)
    margin = len(f"rank {shown[-1]} |")
    columns = max(BEFORE + 1, (WIDTH - margin) // (width + 1))
    lines = []
    for rank in shown:
        row = schedule.actions[rank]
        at = min((place for r, place in cells if r == rank), default=middle)
        first = max(0, min(at - BEFORE, len(row) - columns))
        words = [
            f"[{action}]" if (rank, place) in cells else f" {action} "
            for place, action in enumerate(row[first : first + columns], first)
        ]
        head = f"rank {rank}".ljust(margin - 1) + ("|... " if first else "|")
        line = head + " ".join(word.ljust(width) for word in words)
        lines.append(line.rstrip() + (" ..." if first + columns < len(row) else ""))
    return "\n".join(lines)
