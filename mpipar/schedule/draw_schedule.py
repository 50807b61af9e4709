"""Pictures of a CommSchedule: a column for each rank, time downwards, an arrow for each message.

    round     0           1           2           3
              |           |           |           |
        0     |--- +3 --->|--- +0 --->|--- +1 --->|
              |<-------------- +2 ----------------|

`+3` says that the receiver adds chunk 3 to its own, `3` that it takes chunk 3 in place of it.  An
arrow of `=` is no message: the rank at its head reads the chunk in memory that both share.  A
message stands in the receiver's round, which is moved down where it has to wait, so that no message
is drawn above what its sender needs first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mpipar.errors import ScheduleError
from mpipar.schedule.core import CommSchedule, Read, ReadReduce, RecvReduce, Send
from mpipar.schedule.svg import BAND, BLUE, FAINT, INK, MUTED, ORANGE, Canvas, text_width
from mpipar.schedule.text import describe


@dataclass(frozen=True)
class Message:
    """All that one rank sends another in one round; `level` is the row of the picture.

    `read` says that the target reads it in the source's memory.
    """

    source: int
    target: int
    level: int
    chunks: tuple[int, ...]
    added: bool
    read: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """The columns that the arrow joins, left one first."""
        return min(self.source, self.target), max(self.source, self.target)

    def label(self, room: float) -> str:
        """Return the chunks in at most `room` characters, shortened to their number if need be."""
        sign = "+" if self.added else ""
        for words in (sign + _ranges(self.chunks), f"{sign}[{len(self.chunks)}]"):
            if len(words) <= room:
                return words
        return ""


def _ranges(chunks: Sequence[int]) -> str:
    """Return ascending runs as first-last: 0-2,5."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def messages(schedule: CommSchedule) -> list[Message]:
    """Return all messages, by level.  Raises ScheduleError if sends and receives do not match."""
    sends: dict[tuple[int, int], deque[int]] = {}  # (source, target) -> sender's rounds, in order
    taken: list[list[tuple[int, int, list[int], bool, bool]]] = []  # target, (its round, ...)
    for rank in range(schedule.ranks):
        rows = []
        for index, ops in enumerate(schedule.rounds(rank)):
            receives: dict[tuple[int, bool], tuple[list[int], bool]] = {}
            for peer in dict.fromkeys(op.peer for op in ops if isinstance(op, Send)):
                sends.setdefault((rank, peer), deque()).append(index)
            for op in ops:
                if not isinstance(op, Send):
                    added = isinstance(op, RecvReduce | ReadReduce)
                    key = op.peer, isinstance(op, Read | ReadReduce)
                    receives.setdefault(key, ([], added))[0].append(op.chunk)
            rows += [
                (index, peer, chunks, added, read)
                for (peer, read), (chunks, added) in receives.items()
            ]
        taken.append(rows)
    joined = []  # (source, its round, target, its round, chunks, added, read)
    for rank, rows in enumerate(taken):
        for index, peer, chunks, added, read in rows:
            if read:
                joined.append((peer, index, rank, index, tuple(chunks), added, True))
                continue
            queue = sends.get((peer, rank))
            if not queue:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} receives in its round {index} a message that "
                    f"rank {peer} never sends"
                )
            joined.append((peer, queue.popleft(), rank, index, tuple(chunks), added, False))
    levels = _levels(schedule, [(s, i, t, j) for s, i, t, j, _, _, _ in joined])
    found = [Message(s, t, levels[t, j], c, a, read) for s, _, t, j, c, a, read in joined]
    return sorted(found, key=lambda m: (m.level, m.span, m.source))


def _levels(
    schedule: CommSchedule, joined: list[tuple[int, int, int, int]]
) -> dict[tuple[int, int], int]:
    """Return the first row that each (rank, round) can have."""
    counts = [sum(1 for _ in schedule.rounds(rank)) for rank in range(schedule.ranks)]
    level = {(rank, i): i for rank, count in enumerate(counts) for i in range(count)}
    for _ in range(len(level) + 1):
        before = dict(level)
        for source, i, target, j in joined:
            level[target, j] = max(level[target, j], level.get((source, i), 0))
        for rank, count in enumerate(counts):
            for i in range(1, count):
                level[rank, i] = max(level[rank, i], level[rank, i - 1] + 1)
        if level == before:
            return level
    raise ScheduleError(f"{schedule.name} does not end: ranks wait for each other in a circle")


def _lanes(row: list[Message]) -> list[list[Message]]:
    """Pack the messages of one row into lines in which no two arrows overlap."""
    lanes: list[list[Message]] = []
    for message in sorted(row, key=lambda m: (m.span[1] - m.span[0], m.span, m.source)):
        low, high = message.span
        for lane in lanes:
            if all(high <= other.span[0] or low >= other.span[1] for other in lane):
                lane.append(message)
                break
        else:
            lanes.append([message])
    return lanes


def _rows(found: list[Message]) -> list[list[list[Message]]]:
    """Return for each level its lanes."""
    by_level: dict[int, list[Message]] = {}
    for message in found:
        by_level.setdefault(message.level, []).append(message)
    return [_lanes(by_level[level]) for level in sorted(by_level)]


def _title(schedule: CommSchedule, found: list[Message]) -> str:
    rounds = len({message.level for message in found})
    read = sum(message.read for message in found)
    counts = [(schedule.chunks, "chunk"), (rounds, "round"), (len(found) - read, "message")]
    counts += [(read, "read")] if read else []
    counted = ", ".join(_count(n, what) for n, what in counts)
    return f"{schedule.name} on {_count(schedule.ranks, 'rank')}: {counted}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def text(schedule: CommSchedule, width: int = 96) -> str:
    """Return the picture in at most `width` characters a line, ending without a newline.

    Where the ranks do not fit in columns, there is a line of text for each rank instead (see
    `mpipar.schedule.text`).
    """
    found = messages(schedule)
    title = _title(schedule, found)
    pitch = min(16, (width - 10) // schedule.ranks)
    if pitch < 8:
        return f"{title}\n\n{describe(schedule)}"
    columns = [10 + rank * pitch for rank in range(schedule.ranks)]
    heads = [" "] * (columns[-1] + len(str(schedule.ranks)))
    for rank, x in enumerate(columns):
        heads[x : x + len(str(rank))] = str(rank)
    lines = [title, "", "round" + "".join(heads)[5:].rstrip()]
    for index, lanes in enumerate(_rows(found)):
        lines.append(_canvas(columns))
        for number, lane in enumerate(lanes):
            line = _canvas(columns, f"{index:5d}" if number == 0 else "")
            for message in lane:
                line = _arrow(line, columns, message)
            lines.append(line)
    return "\n".join([*lines, _canvas(columns)])


def _canvas(columns: list[int], head: str = "") -> str:
    line = [" "] * (columns[-1] + 1)
    line[: len(head)] = head
    for x in columns:
        line[x] = "|"
    return "".join(line)


def _arrow(line: str, columns: list[int], message: Message) -> str:
    low, high = (columns[rank] for rank in message.span)
    room = high - low - 1
    label = message.label(room - 4)
    line_of = "=" if message.read else "-"
    shaft = f" {label} ".center(room - 1, line_of) if label else line_of * (room - 1)
    shaft = f"{shaft}>" if message.source < message.target else f"<{shaft}"
    return line[: low + 1] + shaft + line[high:]


def svg(schedule: CommSchedule) -> str:
    """Return the picture as an SVG document."""
    found = messages(schedule)
    rows = _rows(found)
    left, top, pitch, lane_height, gap = 84, 96, 110, 24, 12
    columns = [left + 30 + rank * pitch for rank in range(schedule.ranks)]
    right = columns[-1] + 46
    canvas = Canvas()
    title = _title(schedule, found)
    canvas.text(24, 34, title, 15, weight=600)
    legend_end = _legend(canvas, 24, 56)
    y, bands = float(top), []
    for lanes in rows:
        height = len(lanes) * lane_height + gap
        bands.append((y, height))
        y += height
    for index, (start, height) in enumerate(bands):
        if index % 2 == 0:
            canvas.rect(24, start, right - 24, height, BAND, 4)
        canvas.text(36, start + height / 2 + 4, f"round {index}", 11, MUTED)
    for rank, x in enumerate(columns):
        canvas.text(x, top - 10, f"rank {rank}", 12, INK, "middle", 600)
        canvas.line(x, top, x, y, FAINT, 2)
    for (start, _), lanes in zip(bands, rows, strict=True):
        for number, lane in enumerate(lanes):
            for message in lane:
                middle = start + gap / 2 + (number + 0.5) * lane_height
                _svg_arrow(canvas, columns, message, middle)
    width = max(right + 24, 48 + text_width(title, 16), legend_end)
    return canvas.document(width, y + 24)


def _svg_arrow(canvas: Canvas, columns: list[int], message: Message, y: float) -> None:
    colour = ORANGE if message.added else BLUE
    source, target = columns[message.source], columns[message.target]
    inward = 3 if source < target else -3
    canvas.arrow(source + inward, y - 4, target - inward, y + 4, colour)
    label = message.label((abs(target - source) - 40) / 6)
    width, x = text_width(label, 11) + 8, (source + target) / 2
    canvas.rect(x - width / 2, y - 8, width, 16, "#ffffff", 8)
    canvas.text(x, y + 4, label, 11, colour, "middle", 600)


def _legend(canvas: Canvas, x: float, y: float) -> float:
    """Draw what the colours mean; return where it ends."""
    for colour, words in (
        (BLUE, "3  the receiver takes chunk 3"),
        (ORANGE, "+3  the receiver adds chunk 3 to its own"),
    ):
        canvas.arrow(x, y - 4, x + 26, y - 4, colour)
        canvas.text(x + 34, y, words, 11, MUTED)
        x += 52 + text_width(words, 11)
    return x
