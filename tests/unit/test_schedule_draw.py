"""Pictures of schedules and Timelines, as text and as SVG."""

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from mpipar.errors import ConfigError, ScheduleError
from mpipar.schedule import (
    CommSchedule,
    Network,
    Round,
    draw,
    make,
    parse_rounds,
    segment,
    simulate,
)
from mpipar.schedule.draw_schedule import messages
from mpipar.schedule.draw_timeline import lanes, seconds
from mpipar.trace import Span, Timeline

RING = """
all_gather/ring on 4 ranks: 4 chunks, 3 rounds, 12 messages

round     0               1               2               3
          |               |               |               |
    0     |----- 0 ------>|----- 1 ------>|----- 2 ------>|
          |<--------------------- 3 ----------------------|
          |               |               |               |
    1     |----- 3 ------>|----- 0 ------>|----- 1 ------>|
          |<--------------------- 2 ----------------------|
          |               |               |               |
    2     |----- 2 ------>|----- 3 ------>|----- 0 ------>|
          |<--------------------- 1 ----------------------|
          |               |               |               |
"""

FOLDED = """
all_reduce/halving_doubling on 3 ranks: 2 chunks, 4 rounds, 6 messages

round     0               1               2
          |               |               |
    0     |<---- +0-1 ----|               |
          |               |               |
    1     |------------- +1 ------------->|
          |<------------- +0 -------------|
          |               |               |
    2     |------------- 0 -------------->|
          |<------------- 1 --------------|
          |               |               |
    3     |---- 0-1 ----->|               |
          |               |               |
"""

TREE = """
reduce/tree on 8 ranks: 1 chunk, 3 rounds, 7 messages

round     0         1         2         3         4         5         6         7
          |         |         |         |         |         |         |         |
    0     |<-- +0 --|         |<-- +0 --|         |<-- +0 --|         |<-- +0 --|
          |         |         |         |         |         |         |         |
    1     |<------- +0 -------|         |         |<------- +0 -------|         |
          |         |         |         |         |         |         |         |
    2     |<----------------- +0 -----------------|         |         |         |
          |         |         |         |         |         |         |         |
"""


@pytest.mark.parametrize(
    ("name", "p", "picture"),
    [
        ("all_gather/ring", 4, RING),
        ("all_reduce/halving_doubling", 3, FOLDED),
        ("reduce/tree", 8, TREE),
    ],
)
def test_text_of_a_schedule(name: str, p: int, picture: str) -> None:
    assert draw(make(*name.split("/"), p)) == picture.strip("\n")


def test_lines_are_as_wide_as_allowed() -> None:
    for p in (1, 2, 5, 8, 10):
        for name in ("all_reduce/ring", "all_to_all/direct", "all_reduce/halving_doubling"):
            for width in (80, 96):
                text = draw(make(*name.split("/"), p), width=width)
                assert max(map(len, text.splitlines())) <= width or "0: " in text
    assert "\n0: " in draw(make("all_reduce", "ring", 13))  # too many for columns


def test_long_lists_of_chunks_are_counted() -> None:
    text = draw(segment(make("all_gather", "bruck", 8), 3), width=80)
    assert "0,3,6" in text
    assert "[3]" not in text
    shortened = draw(make("all_to_all", "bruck", 8), width=80)
    assert "[4]" in shortened


def test_one_rank() -> None:
    text = draw(make("all_reduce", "ring", 1))
    assert text.startswith("all_reduce/ring on 1 rank: 1 chunk, 0 rounds, 0 messages")
    ElementTree.fromstring(draw(make("all_reduce", "ring", 1), "svg"))


def written(text: str) -> CommSchedule:
    lines = text.splitlines()

    def rounds(rank: int) -> Iterator[Round]:
        return iter(parse_rounds(lines[rank]))

    return CommSchedule("all_reduce", "written", len(lines), 1, rounds)


def test_a_message_is_drawn_where_it_is_received() -> None:
    found = messages(written("0>1 | 0>1\n0<0 | 0<0 | 0>2\n0<1 | "))
    assert [(m.source, m.target, m.level) for m in found] == [(0, 1, 0), (0, 1, 1), (1, 2, 2)]


def test_schedules_that_cannot_be_drawn() -> None:
    with pytest.raises(
        ScheduleError, match=r"rank 1 receives in its round 0 .* rank 0 never sends"
    ):
        draw(written("\n0<0"))
    with pytest.raises(ScheduleError, match="in a circle"):
        draw(written("0<1 | 0>1\n0<0 | 0>0"))
    with pytest.raises(ConfigError, match="format='png': it is text or svg"):
        draw(written("0>1\n0<0"), "png")  # type: ignore[arg-type]


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "name", ["all_reduce/ring", "all_reduce/halving_doubling", "barrier/dissemination"]
)
@pytest.mark.parametrize("p", [2, 5, 8])
def test_svg_of_a_schedule(name: str, p: int) -> None:
    schedule = make(*name.split("/"), p)
    picture = ElementTree.fromstring(draw(schedule, "svg"))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    legend = 2
    heads = picture.findall(f"{SVG}polygon")
    assert len(heads) == len(messages(schedule)) + legend
    for head in heads:
        for point in head.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    words = [text.text for text in picture.findall(f"{SVG}text")]
    assert {f"rank {rank}" for rank in range(p)} <= set(words)
    assert words[0] is not None
    assert words[0].startswith(f"{name} on {p} ranks")


def pipeline() -> Timeline:
    """Return two stages and two micro-batches, forward 1 s and backward 2 s."""
    timeline = Timeline()
    for rank, name, kind, start, stop in [
        (0, "F0", "F", 0, 1), (0, "F1", "F", 1, 2), (0, "B0", "B", 4, 6), (0, "B1", "B", 6, 8),
        (1, "F0", "F", 1, 2), (1, "B0", "B", 2, 4), (1, "F1", "F", 4, 5), (1, "B1", "B", 5, 7),
    ]:  # fmt: skip
        timeline.add(Span(rank, name, kind, start, stop))
    return timeline


PIPELINE = """
rank 0  |F0FFF|F1FFF            |B0BBBBBBBBB|B1BBBBBBBBB
rank 1        |F0FFF|B0BBBBBBBBB|F1FFF|B1BBBBBBBBB
        0                                            8 s

F F  B B
"""

EXCHANGE = """
rank 0  |to 1>>>>>>>>|add+++++++|to 1>>>>>>>>
        |from 1<<<<<<           |from 1<<<<<<
rank 1  |to 0>>>>>>>>|add+++++++|to 0>>>>>>>>
        |from 0<<<<<<           |from 0<<<<<<
        0                              260 us

> send  < recv  + reduce
"""


def test_text_of_timelines() -> None:
    assert draw(pipeline(), width=57) == PIPELINE.strip("\n")
    network = Network(alpha=0, beta=1e-9, gamma=0.8e-9)
    timeline = simulate(make("all_reduce", "ring", 2), 185_714, network, full=True).timeline
    assert draw(timeline, width=46) == EXCHANGE.strip("\n")


def test_an_empty_timeline() -> None:
    assert draw(Timeline()).splitlines()[0].strip().startswith("0")
    ElementTree.fromstring(draw(Timeline(), "svg"))


def test_lanes() -> None:
    spans = [
        Span(0, "a", "send", 0, 2), Span(0, "b", "send", 1, 3), Span(0, "c", "send", 2, 4),
        Span(0, "d", "reduce", 3.5, 5), Span(0, "e", "recv", 0, 5),
    ]  # fmt: skip
    assert [[span.name for span in lane] for lane in lanes(spans)] == [
        ["a", "c"],
        ["b", "d"],
        ["e"],
    ]


def test_svg_of_a_timeline() -> None:
    spans = Timeline([Span(0, "a < b & c", "compute", 0, 1e-3), Span(3, "", "wait", 0, 2e-3, 0, 5)])
    picture = ElementTree.fromstring(draw(spans, "svg", title="measured <now>"))
    words = [text.text for text in picture.findall(f"{SVG}text")]
    assert words[0] == "measured <now>"
    assert {"rank 0", "rank 3", "a < b & c", "0", "1 ms", "2 ms"} <= set(words)
    hints = [hint.text for hint in picture.iter(f"{SVG}title")]
    assert hints == ["rank 0 compute a < b & c: 0 to 1 ms", "rank 3 wait , 5 bytes: 0 to 2 ms"]


def test_seconds() -> None:
    for value, words in [
        (0, "0"), (3e-10, "0.3 ns"), (1.5e-6, "1.5 us"), (12.34e-6, "12.3 us"), (1e-3, "1 ms"),
        (0.9996, "1000 ms"), (3.456, "3.46 s"), (1234.5, "1234 s"),
    ]:  # fmt: skip
        assert seconds(value) == words
