"""Gantt charts of a Timeline, simulated or measured: rows are ranks, time runs to the right.

    rank 0  |to 1>>>|to 1>>>|
            |from 3<|from 3<|++
            0               12 us

Spans of one rank that overlap in time get lanes of their own; spans of one kind keep to one lane
where they can.
"""

from collections.abc import Sequence
from itertools import pairwise

from mpipar.schedule.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Canvas,
    text_width,
)
from mpipar.trace import Span, Timeline

FILL = {"send": ">", "recv": "<", "reduce": "+", "compute": "#", "wait": "."}
FILL |= {"forward": "-", "backward": "=", "weight": "~"}
COLOURS = {"send": BLUE, "recv": SKY, "reduce": ORANGE, "compute": GREEN, "wait": "#c3cbd3"}
COLOURS |= {"forward": BLUE, "backward": GREEN, "weight": ORANGE}  # actions of a pipeline
SPARE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)  # for other kinds, in order of appearance

Lane = list[Span]


def lanes(spans: list[Span]) -> list[Lane]:
    """Return the spans of one rank as lanes in which none overlap, a kind in few of them."""
    found: list[Lane] = []
    for kind in dict.fromkeys(span.kind for span in spans):
        tracks: list[Lane] = []
        for span in (span for span in spans if span.kind == kind):
            free = [track for track in tracks if not _overlap(track[-1], span)]
            if free:
                free[0].append(span)
            else:
                tracks.append([span])
        for track in tracks:
            place = next((lane for lane in found if _fits(lane, track)), None)
            if place is None:
                found.append(list(track))
            else:
                place.extend(track)
                place.sort(key=lambda span: span.start)
    return found


def _overlap(a: Span, b: Span) -> bool:
    slack = 1e-9 * max(a.stop, b.stop)
    return a.start < b.stop - slack and b.start < a.stop - slack


def _fits(lane: Lane, track: Lane) -> bool:
    """Say whether two lanes can be one."""
    both = sorted([*lane, *track], key=lambda span: (span.start, span.stop))
    return not any(_overlap(a, b) for a, b in pairwise(both))


def seconds(value: float) -> str:
    """Return a time with three digits and a unit that suits it: 12 us, 3.46 ms."""
    if value == 0:
        return "0"
    fits = [(u, size) for u, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if value >= size]
    unit, size = fits[0] if fits else ("ns", 1e-9)
    number = value / size
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def text(timeline: Timeline, width: int = 96, end: float | None = None) -> str:
    """Return the chart in at most `width` characters a line, ending without a newline.

    end: the time at the right edge, so that charts can be compared; that of the last span if None.
    A span shows its name where there is room, and is filled by kind: send >, recv <, reduce +,
    compute #, wait ., forward -, backward =, weight ~, others by their first letter.
    """
    heads = {rank: f"rank {rank}" for rank in timeline.ranks()}
    margin = max((len(head) for head in heads.values()), default=6) + 2
    cells, end = width - margin - 1, timeline.makespan if end is None else end
    lines = []
    for rank, head in heads.items():
        for number, lane in enumerate(lanes(timeline.of(rank))):
            lines.append((head if number == 0 else "").ljust(margin) + _bar(lane, end, cells))
    stop = seconds(end)
    lines.append(" " * margin + "0" + stop.rjust(cells - 1))
    kinds = dict.fromkeys(span.kind for span in timeline.spans)
    legend = "  ".join(f"{FILL.get(kind, kind[:1])} {kind}" for kind in kinds)
    return "\n".join([*(line.rstrip() for line in lines), "", legend])


def _bar(lane: Lane, end: float, cells: int) -> str:
    scale = cells / end if end else 0.0
    bar = [" "] * cells
    for span in lane:
        first = min(cells - 1, round(span.start * scale))
        size = max(1, round(span.stop * scale) - first)
        fill = FILL.get(span.kind, span.kind[:1])
        words = span.name if len(span.name) + 2 <= size else ""
        bar[first : first + size] = ("|" + words).ljust(size, fill) if size > 1 else fill
    return "".join(bar[:cells])


def svg(timeline: Timeline, title: str = "") -> str:
    """Return the chart as an SVG document."""
    ranks = len(timeline.ranks())
    title = title or f"{ranks} ranks, {seconds(timeline.makespan)}"
    return svg_of_several(title, [("", timeline)])


def svg_of_several(title: str, charts: Sequence[tuple[str, Timeline]]) -> str:
    """Return charts, each below its own words, on one scale, as an SVG document."""
    left, width, y = 92.0, 960.0, 84.0
    end = max(timeline.makespan for _, timeline in charts)
    everything = Timeline([span for _, timeline in charts for span in timeline.spans])
    colours, canvas = _colours(everything), Canvas()
    canvas.text(24, 32, title, 15, INK, weight=600)
    _legend(canvas, colours, 24, 56)
    for words, timeline in charts:
        if words:
            canvas.text(24, y + 8, words, 12)
            y += 28
        y = _svg_chart(canvas, timeline, y, (left, width, end), colours) + 36
    return canvas.document(left + width + 40, y)


def _svg_chart(
    canvas: Canvas,
    timeline: Timeline,
    top: float,
    axis: tuple[float, float, float],
    colours: dict[str, str],
) -> float:
    """Draw the rows and the axis (left, width, end in seconds); return where they end."""
    (left, width, end), height, gap = axis, 20.0, 10.0
    scale = width / end if end else 0.0
    rows = {rank: lanes(timeline.of(rank)) for rank in timeline.ranks()}
    total = sum(len(found) * height + gap for found in rows.values())
    for tick in _ticks(end):
        x = left + tick * scale
        canvas.line(x, top - 4, x, top + total, FAINT)
        canvas.text(x, top + total + 16, seconds(tick), 10.5, MUTED, "middle")
    y = top
    for rank, found in rows.items():
        canvas.text(left - 12, y + len(found) * height / 2 + 4, f"rank {rank}", 12, INK, "end", 600)
        for lane in found:
            for span in lane:
                _svg_span(canvas, span, left, scale, y, height - 3, colours[span.kind])
            y += height
        y += gap
    return top + total


def _svg_span(
    canvas: Canvas, span: Span, left: float, scale: float, y: float, height: float, colour: str
) -> None:
    x, width = left + span.start * scale, max(0.6, (span.stop - span.start) * scale)
    size = f", {span.bytes:,} bytes" if span.bytes else ""
    times = f"{seconds(span.start)} to {seconds(span.stop)}"
    hint = f"rank {span.rank} {span.kind} {span.name}{size}: {times}"
    canvas.rect(x, y, max(0.6, width - 0.8), height, colour, 2 if width > 6 else 0, hint)
    if text_width(span.name, 10) + 6 <= width:
        ink = "#ffffff" if colour in (BLUE, GREEN, RED, PURPLE) else INK
        canvas.text(x + width / 2, y + height / 2 + 3.5, span.name, 10, ink, "middle")


def _colours(timeline: Timeline) -> dict[str, str]:
    """Return a colour for each kind of span, in order of first appearance."""
    kinds = dict.fromkeys(span.kind for span in timeline.spans)
    others = [kind for kind in kinds if kind not in COLOURS]
    spare = {kind: SPARE[i % len(SPARE)] for i, kind in enumerate(others)}
    return {kind: COLOURS.get(kind) or spare[kind] for kind in kinds}


def _legend(canvas: Canvas, colours: dict[str, str], x: float, y: float) -> None:
    for kind, colour in colours.items():
        canvas.rect(x, y - 11, 14, 14, colour, 3)
        canvas.text(x + 20, y, kind, 11, MUTED)
        x += 44 + text_width(kind, 11)


def _ticks(end: float) -> list[float]:
    """Return four to ten round times from 0 to `end`."""
    if end <= 0:
        return [0.0]
    step = 10.0**-30
    while end / step > 10:
        step *= 10
    step = next(s for s in (0.1 * step, 0.2 * step, 0.5 * step, step) if end / s <= 10)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]
