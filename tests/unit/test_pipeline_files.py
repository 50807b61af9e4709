"""Pipeline schedules as CSV files and as pictures."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mpipar.schedule
from mpipar.errors import ConfigError, MpiparError, ScheduleError
from mpipar.schedule.pipeline import (
    draw,
    from_csv,
    idle,
    load,
    lower,
    make,
    pipelines,
    resolve,
    simulate,
    to_csv,
    verify,
)
from mpipar.trace import Span, Timeline

CSV = """\
0F0,0F1,,0B0,,0B1
,1F0,1B0,1F1,1B1
"""


def test_csv_shows_the_slots() -> None:
    assert to_csv(make("1f1b", 2, 2)) == CSV
    swapped = from_csv(CSV.replace("1F0,1B0", "1B0,1F0"))
    assert to_csv(swapped) == "0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n"  # it never ends: no slots


@pytest.mark.parametrize("name", pipelines())
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 3), (4, 8)])
def test_csv_there_and_back(name: str, p: int, m: int) -> None:
    schedule = make(name, p, m)
    assert from_csv(to_csv(schedule), name) == schedule
    lowered = lower(schedule)
    assert from_csv(to_csv(lowered), name) == lowered


def test_csv_of_other_programs() -> None:
    text = '\ufeff"0F0", 0F1 ,,0I0,0W0\r\n\r\n,1F0,1B0,1F1\r\n,,,,,\n'
    schedule = from_csv(text.removeprefix("\ufeff"))
    assert str(schedule) == "0: 0F0 0F1 0B0 0W0\n1: 1F0 1B0 1W0 1F1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["it has no actions"]),
        ("\n , ,\n", ["it has no actions"]),
        ("0F0," + 200_000 * "x", ["it is no table: field larger"]),
        (CSV.replace("1B0", "1Q0"), ["bad.csv, row 2, column 3: action='1Q0'", "2F0, 1B3 or 0W1"]),
        (CSV.replace("1B0", "0x3"), ["row 2, column 3"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1 has no action, but stage 2 has"]),
        (CSV.replace("1B1", ""), ["1B1 is missing on rank 1", "[1F1]"]),
        (CSV.replace("0B1", "0B0"), ["0B0 is doubled on rank 0", "[0B0]"]),
        (CSV.replace("1B0", "1B1", 1), ["1B1 is doubled on rank 1", "[1B1]"]),
        (CSV.replace("0F0,0F1,,0B0", "0F0,0B0,,0F1").replace("1B0,1F1", "1F1,1B0"), ["deadlock"]),
        (CSV.replace("0F0,", "0F0,0F999999999,"), ["0F2 is missing"]),
    ],
)
def test_bad_files(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        load(path)
    assert "bad.csv" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe0\x00F\x000")
    with pytest.raises(ConfigError, match="it is not text"):
        load(tmp_path / "binary.csv")


def test_by_name_or_by_file(tmp_path: Path) -> None:
    assert resolve("zb1p", 4, 8) == make("zb1p", 4, 8)
    path = tmp_path / "own.csv"
    path.write_text(to_csv(make("zbv", 2, 3)), encoding="utf-8-sig")
    assert resolve(str(path), 2, 3).actions == make("zbv", 2, 3).actions
    assert resolve(str(path), 2, 3, chunks=2).placement == (0, 1, 1, 0)
    for wrong, words in [
        ((str(path), 4, 3), "2 ranks, and 4 are asked for"),
        ((str(path), 2, 4), "3 micro-batches, and 4"),
        ((str(path), 2, 3, 1), "4 stages, and 2"),
        (("1f2b", 2, 3), "pipeline schedules are"),
        (("./none", 2, 3), "cannot be read"),
    ]:
        with pytest.raises(MpiparError, match=words):
            resolve(*wrong)  # type: ignore[arg-type]


PICTURE = """\
1f1b on 2 ranks: 3 micro-batches, 8 slots

slot    0  1  2  3  4  5  6  7
rank 0  F0 F1 .  B0 F2 B1 .  B2
rank 1  .  F0 B0 F1 B1 F2 B2

idle 25.0 % of the slots; most activations held, by rank: 2 1"""

PANELS = """\
interleaved on 2 ranks: 4 stages, 2 micro-batches, 10 slots

slot    0   1   2   3   4   5   6
rank 0  0F0 0F1 2F0 2F1 .   2B0 .
rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1

slot    7   8   9
rank 0  2B1 0B0 0B1
rank 1  1B0 1B1

idle 20.0 % of the slots; most
activations held, by rank: 4 3"""


def test_text_picture() -> None:
    assert draw(make("1f1b", 2, 3)) == PICTURE
    assert draw(lower(make("1f1b", 2, 3))) == PICTURE
    assert mpipar.schedule.draw(make("1f1b", 2, 3)) == PICTURE
    assert draw(make("interleaved", 2, 2), width=36) == PANELS
    assert max(map(len, draw(make("interleaved", 12, 24), width=70).split("\n"))) <= 70


@pytest.mark.parametrize("name", pipelines())
def test_svg_picture(name: str) -> None:
    schedule = make(name, 3, 4)
    root = ElementTree.fromstring(draw(schedule, "svg"))
    hints = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(hints) == len(set(hints)) == sum(map(len, schedule.actions))
    assert "rank 0, slot 0: forward of micro-batch 0 on stage 0" in hints
    fills = {rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert {"#0072b2", "#009e73"} <= fills
    assert ("#d98200" in fills) is schedule.split
    assert len(fills) == 2 + (2 + schedule.split) * schedule.chunks


def test_no_other_format() -> None:
    with pytest.raises(ConfigError, match="format='png'"):
        draw(make("1f1b", 2, 2), "png")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="deadlock"):
        draw(from_csv(CSV.replace("1F0,1B0", "1B0,1F0")))


def test_chart_of_a_timeline() -> None:
    found = simulate(make("zb1p", 2, 2), 1e-3, 1e-3, 1e-3)
    chart = mpipar.schedule.draw(found.timeline, width=80)
    assert re.search(r"rank 1 +\|1F0-+\|1B0=+\|1F1-+\|1B1=+\|1W0~+\|1W1~+", chart)
    assert "- forward  = backward  ~ weight" in chart
    svg = mpipar.schedule.draw(found.timeline, "svg")
    assert all(colour in svg for colour in ("#0072b2", "#009e73", "#d98200"))


def test_idle_share_of_a_measured_timeline() -> None:
    timeline = Timeline()
    assert idle(timeline) == 0
    timeline.add(Span(0, "0F0", "forward", 0.0, 2.0))
    timeline.add(Span(0, "0SEND_F0", "send", 2.0, 4.0))
    timeline.add(Span(1, "1F0", "forward", 3.0, 4.0))
    assert idle(timeline) == pytest.approx(1 - 3 / 8)


def test_verify_says_how_it_runs() -> None:
    assert verify(make("gpipe", 3, 4)).count == 12
