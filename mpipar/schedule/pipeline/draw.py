"""The familiar picture of a pipeline: rows are ranks, columns slots of time, every action one slot.

    slot    0  1  2  3  4  5  6  7
    rank 0  F0 F1 .  B0 F2 B1 .  B2
    rank 1  .  F0 B0 F1 B1 F2 B2

Where a rank holds several stages, a cell names the stage too: 4F0.  In SVG the kind of an action is
its colour, and a rank's later stages are lighter.  Pictures in which actions have their own
lengths are those of a Timeline, simulated or measured: `mpipar.schedule.draw(result.timeline)`.
"""

from textwrap import wrap
from typing import Literal

from mpipar.errors import ConfigError, explain
from mpipar.schedule.pipeline.action import COMPUTE, Action
from mpipar.schedule.pipeline.core import PipelineSchedule, peak_live
from mpipar.schedule.pipeline.slots import Slots
from mpipar.schedule.pipeline.verify import verify
from mpipar.schedule.svg import BAND, BLUE, GREEN, INK, MUTED, ORANGE, Canvas, text_width

COLOURS = {"F": BLUE, "B": GREEN, "W": ORANGE}


def draw(
    schedule: PipelineSchedule, format: Literal["text", "svg"] = "text", width: int = 96
) -> str:
    """Return the picture of a schedule; messages of a lowered one are left out.

    `width` is the longest line of a text, in characters: longer pictures go on below.  Raises
    ScheduleError for a schedule that is not correct, ConfigError for another format.
    """
    if format not in ("text", "svg"):
        raise ConfigError(explain("format", format, "it is text or svg", "Choose one of them"))
    ran = verify(schedule.computation())
    return _text(schedule, ran, width) if format == "text" else _svg(schedule, ran)


def headline(schedule: PipelineSchedule, ran: Slots) -> str:
    """Return the line above a picture: name and sizes."""
    ranks, stages, m = schedule.ranks, schedule.stages, schedule.microbatches
    held = f"{stages} stages, " if stages != ranks else ""
    return (
        f"{schedule.name} on {_many(ranks, 'rank')}: {held}{_many(m, 'micro-batch')}, "
        f"{_many(ran.count, 'slot')}"
    )


def summary(schedule: PipelineSchedule, ran: Slots) -> str:
    """Return the line below a picture: idle slots, activations held."""
    cells = schedule.ranks * ran.count
    idle = cells - sum(ran.ended)
    held = " ".join(map(str, peak_live(schedule)))
    return f"idle {100 * idle / cells:.1f} % of the slots; most activations held, by rank: {held}"


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('ch') else 's'}"


def _label(schedule: PipelineSchedule, action: Action | None) -> str:
    if action is None:
        return "."
    stage = str(action.stage) if schedule.stages != schedule.ranks else ""
    return f"{stage}{action.kind}{action.microbatch}"


def _text(schedule: PipelineSchedule, ran: Slots, width: int) -> str:
    words = [[_label(schedule, action) for action in row] for row in ran.rows]
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = len(heads[-1]) + 2
    cell = 1 + max(len(str(ran.count - 1)), *(len(word) for row in words for word in row))
    panel = max(1, (width - margin + 1) // cell)
    lines = [headline(schedule, ran)]
    for first in range(0, ran.count, panel):
        columns = range(first, min(first + panel, ran.count))
        numbers = "".join(str(slot).ljust(cell) for slot in columns)
        lines += ["", "slot".ljust(margin) + numbers.rstrip()]
        for head, row in zip(heads, words, strict=True):
            cells = "".join(word.ljust(cell) for word in row[first : columns.stop])
            lines.append((head.ljust(margin) + cells).rstrip())
    return "\n".join([*lines, "", *wrap(summary(schedule, ran), width)])


def _svg(schedule: PipelineSchedule, ran: Slots) -> str:
    left, top, height, size = 92.0, 84.0, 26.0, 11.0
    labels = [_label(schedule, action) for row in ran.rows for action in row]
    cell = max(26.0, 10 + max(text_width(label, size) for label in labels))
    canvas = Canvas()
    canvas.text(24, 32, headline(schedule, ran), 15, INK, weight=600)
    _legend(canvas, schedule, 24, 56)
    for rank, row in enumerate(ran.rows):
        y, held = top + rank * (height + 4), schedule.held(rank)
        canvas.text(left - 12, y + height / 2 + 4, f"rank {rank}", 12, INK, "end", 600)
        canvas.rect(left, y, ran.count * cell, height, BAND, 3)
        for slot, action in enumerate(row):
            if action is not None:
                chunk = held.index(action.stage)
                fill = tint(COLOURS[action.kind], chunk, len(held))
                hint = f"rank {rank}, slot {slot}: {COMPUTE[action.kind]} of micro-batch "
                hint += f"{action.microbatch} on stage {action.stage}"
                x = left + slot * cell
                canvas.rect(x, y, cell - 1, height, fill, 3, hint)
                ink = INK if chunk or action.kind == "W" else "#ffffff"
                word = _label(schedule, action)
                canvas.text(x + cell / 2, y + height / 2 + 4, word, size, ink, "middle")
    bottom = top + schedule.ranks * (height + 4) + 20
    canvas.text(24, bottom, summary(schedule, ran), 11, MUTED)
    wide = max(left + ran.count * cell, 24 + text_width(summary(schedule, ran), 11))
    return canvas.document(wide + 24, bottom + 16)


def _legend(canvas: Canvas, schedule: PipelineSchedule, x: float, y: float) -> None:
    kinds = "FBW" if schedule.split else "FB"
    for kind in kinds:
        canvas.rect(x, y - 11, 14, 14, COLOURS[kind], 3)
        words = COMPUTE[kind]
        canvas.text(x + 20, y, words, 11, MUTED)
        x += 44 + text_width(words, 11)


def tint(colour: str, chunk: int, chunks: int) -> str:
    """Return a colour for a rank's stage number `chunk`: the later, the lighter."""
    share = 0.65 * chunk / max(1, chunks - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
