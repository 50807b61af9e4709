"""Traces without MPI: parts on one clock, what a run that died leaves, the sums, and mistakes."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpipar.cli import trace as command
from mpipar.errors import ConfigError
from mpipar.trace import chrome, record
from mpipar.trace.parts import Event, Part, Writer, path_of
from mpipar.trace.pieces import pieces
from mpipar.trace.record import Label, Recorder
from mpipar.trace.summary import summarise

REDUCE = Label("all_reduce/ring", 4096, "all_reduce(float32, 1024 elements, op=sum) by ring")


class Group:
    """A communicator, as a trace sees it."""

    def __init__(self, number: int, name: str, ranks: Sequence[int]) -> None:
        self.number, self.name, self.ranks = number, name, tuple(ranks)

    def members(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.ranks


def write(
    folder: Path, rank: int, rows: Sequence[tuple[Any, ...]], ahead: float = 0.0, later: float = 0.0
) -> Path:
    """Write a part of a rank whose clock is ahead by seconds at 0, and by others at 100."""
    header = {"rank": rank, "host": "here", "pid": 1, "started": 0.0, "origin": 0.0}
    writer = Writer(path_of(folder, rank), {**header, "clock": [ahead, ahead]})
    groups = [("channel", 4, "dp", 0, 2), ("channel", 9, "gradients of dp", 0, 2)]
    labels = [("label", 0, *REDUCE), ("label", 1, "send to 1", 8, "send")]
    writer.write([*groups, *labels, *rows])
    if later:
        writer.write([("clock", 100.0 + later, later), ("end", 0)])
    writer.close()
    return path_of(folder, rank)


def step(number: int, start: float, stop: float) -> tuple[Any, ...]:
    return "step", start, stop, f"step {number}"


def call(start: float, stop: float, sequence: int, group: int = 4) -> tuple[Any, ...]:
    return "call", start, stop, group, 0, sequence


def action(start: float, stop: float, word: str) -> tuple[Any, ...]:
    return "action", start, stop, 4, word


def test_a_clock_that_drifts_is_put_right(tmp_path: Path) -> None:
    path = write(tmp_path, 1, [call(50.0 + 1.5, 60.0 + 1.6, 3)], ahead=1.0, later=2.0)
    (event,) = Part(path).events()
    drift = (51.5 - 1.0) / 101.0  # of the way between the two comparisons
    assert event.start == pytest.approx(51.5 - (1.0 + drift), abs=1e-6)
    assert event[:3] == (1, "call", "all_reduce/ring")
    assert event[5:] == ("dp", "dp, 2 from rank 0", 3, 4096, REDUCE.details)
    assert Part(path).complete


def test_what_a_run_that_died_leaves_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, [step(1, 1, 2), call(1.2, 1.4, 1), step(2, 2, 3), step(3, 3, 4)], later=1e-9)
    torn = write(tmp_path, 1, [step(1, 1, 2), call(1.1, 1.4, 1), step(2, 2, 3)])
    with torn.open("a") as file:
        file.write('["step",3.0,4')
    assert command.run(command.Config(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "2 ranks, mean of steps 2 to 3, s" in shown
    assert "the run did not come to its end on ranks 1" in shown
    assert len(list(tmp_path.glob("rank-*"))) == 2  # it may still be running
    found = list(chrome.events(tmp_path / "trace.json"))
    steps = [(e.rank, e.name) for e in found if e.kind == "step"]
    assert steps == [*((0, f"step {n}") for n in (1, 2, 3)), (1, "step 1"), (1, "step 2")]
    parts = [e for rank in (0, 1) for e in Part(path_of(tmp_path, rank)).events()]
    for there, here in zip(sorted(found), sorted(parts), strict=True):
        assert there._replace(start=0, stop=0) == here._replace(start=0, stop=0)
        assert (there.start, there.stop) == pytest.approx((here.start, here.stop), abs=1e-8)


def test_the_sums_are_those_of_the_spans(tmp_path: Path) -> None:
    """Rank 1 comes 0.3 s late to one all-reduce a step, and runs one action more."""
    mine, other = [step(1, 0, 1)], [step(1, 0, 1)]
    for n in (1, 2):
        mine += [
            step(n + 1, n, n + 1), action(n, n + 0.4, "0F0"), call(n + 0.4, n + 0.8, n),
            ("wait", n + 0.5, n + 0.8, 4), call(n + 0.9, n + 1, n, group=9),
        ]  # fmt: skip
        other += [
            step(n + 1, n, n + 1), action(n, n + 0.3, "1F0"), action(n + 0.3, n + 0.7, "1B0"),
            call(n + 0.7, n + 0.8, n), call(n + 0.9, n + 1, n, group=9),
        ]  # fmt: skip
    write(tmp_path, 0, mine, later=1e-9)
    write(tmp_path, 1, other, later=1e-9)
    found = summarise(chrome.find(tmp_path))
    assert list(found.steps) == ["2", "3"]
    assert found.axes == ["dp"]
    first, second = found.ranks
    assert [first.step, first.compute, first.exposed["dp"]] == pytest.approx([1.0, 0.5, 0.5])
    assert [second.step, second.compute, second.exposed["dp"]] == pytest.approx([1.0, 0.8, 0.2])
    assert [first.late, first.delays] == pytest.approx([0.3, 0.0], abs=1e-8)
    assert [second.late, second.delays] == pytest.approx([0.0, 0.3], abs=1e-8)
    assert [first.idle, second.idle] == pytest.approx([1 - 0.4 / 0.7, 0.0], abs=1e-8)
    assert found.slowest is second
    assert found.imbalance == pytest.approx(0.8 / 0.65 - 1)
    assert found.text().splitlines()[:5] == [
        "2 ranks, mean of steps 2 to 3, s",
        "",
        "rank  step  compute   dp  late  delays  idle",
        "   0   1.0      0.5  0.5   0.3     0.0   43%",
        "   1   1.0      0.8  0.2   0.0     0.3    0%",
    ]
    assert found.text().splitlines()[6:] == [
        "exposed communication: 35% of a step",
        "steps took 1 to 1 s, step 2 longest",
        "slowest rank: 1, computes 0.8 s, 23% more than the mean",
        "waited for most: rank 1, 0.3 s a step, all other ranks together",
    ]


def test_of_many_ranks_the_extremes_are_shown(tmp_path: Path) -> None:
    for rank in range(20):
        write(tmp_path, rank, [step(1, 0, 1), call(0.5, 0.5 + 0.02 * rank, 0)], later=1e-9)
    lines = summarise(chrome.find(tmp_path)).text().splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["least", "mean", "most"]
    assert lines[0].startswith("20 ranks, step 1, ")
    assert lines[5].split()[3] == "0.4"
    assert "idle" not in lines[2]
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty, 0, [call(0.5, 0.6, 1)])
    assert summarise(chrome.find(empty)).text().startswith("no step is in this trace")


def test_a_moment_belongs_to_the_innermost_span() -> None:
    spans = [
        ("step", "s", 0, 10), ("phase", "f", 1, 8), ("call", "a", 2, 6), ("call", "b", 3, 4),
        ("wait", "w", 3, 4), ("flight", "x", 0, 9), ("phase", "outside", 11, 12),
    ]  # fmt: skip
    found = pieces(Event(0, kind, name, start, stop) for kind, name, start, stop in spans)
    assert [(p.start, p.stop, p.inner.name, p.step is not None) for p in found] == [
        (0, 1, "s", True), (1, 2, "f", True), (2, 3, "a", True), (3, 4, "w", True),
        (4, 6, "a", True), (6, 8, "f", True), (8, 10, "s", True), (11, 12, "outside", False),
    ]  # fmt: skip


def test_memory_and_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FLUSH", 50)
    writer, group = Writer(tmp_path / "rank-00000.jsonl", {"rank": 0}), Group(3, "dp", [0, 2])
    most = 0

    def write(rows: list[record.Row]) -> None:
        nonlocal most
        most = max(most, len(rows))
        writer.write(rows)

    recorder = Recorder(write, 200)
    for number in range(500):
        recorder.call(group, REDUCE, number + 1, 1.0, 0.5)
    recorder.flush()
    assert most <= 53  # with the names of the group and of the call
    assert recorder.count == 200
    writer.close()
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    kept = sum(line.startswith('["call"') for line in lines)
    assert kept + recorder.lost + sum("write trace" in line for line in lines) >= 500
    assert kept <= 200
    assert json.loads(lines[1]) == ["channel", 3, "dp", 0, 2]


def test_calls_of_other_threads_have_tracks_of_their_own() -> None:
    rows: list[record.Row] = []
    recorder = Recorder(rows.extend, 100)
    told = (Group(1, "dp", [0]), REDUCE, 1, time.perf_counter(), 0.1)
    thread = threading.Thread(target=recorder.call, args=told)
    thread.start()
    thread.join()
    recorder.call(*told)
    recorder.flush()
    assert [row[0] for row in rows] == ["channel", "label", "flight", "call"]


def test_a_full_disk_ends_the_file_and_not_the_program(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    with pytest.raises(OSError, match="No space"):
        Writer(full, {"rank": 0})
    writer = Writer(tmp_path / "rank-00000.jsonl", {"rank": 0})
    writer._file.close()
    writer._file = full.open("w")
    for _ in range(2):
        writer.write([("end", 0)])
        assert writer.failure == "No space left on device"
    writer.close()


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trace in this folder"):
        chrome.find(tmp_path)
    other = tmp_path / "trace.json"
    for words in ("[]", "", '{"traceEvents": []}', "\0"):
        other.write_text(words)
        with pytest.raises(ConfigError, match="no trace that mpipar has written"):
            summarise(chrome.find(tmp_path))
        (tmp_path / "rank-00000.jsonl").write_text(words)
        with pytest.raises(ConfigError, match="no part of a trace"):
            chrome.find(tmp_path)
        (tmp_path / "rank-00000.jsonl").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        summarise(tmp_path / "none.json")
    head = json.dumps({"displayTimeUnit": "ms", "mpipar": {}}).removesuffix("}") + chrome.HEAD_END
    for line in ('{"cat": "collective", "na', "[]", '{"cat": "collective"}'):
        other.write_text(f"{head}\n{line}")
        with pytest.raises(ConfigError, match="damaged"):
            list(chrome.events(other))
