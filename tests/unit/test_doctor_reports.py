"""What doctor finds in the reports of a stuck job: invented ones, one rank odd in each."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mpipar.cli.doctor import Config, run
from mpipar.doctor import diagnosis, memory, processes, reports
from mpipar.doctor.reports import Call, Standing
from mpipar.errors import ConfigError


def comm(
    *calls: str, waits_for: tuple[int, ...] = (), heard: Any = None, name: str = "world",
    ranks: tuple[int, ...] = (0, 1, 2), waiting: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """What one rank says of one communicator; `calls` are numbered from 1."""
    told = [
        {"sequence": n, "what": call, "place": "round 0 of 1"} for n, call in enumerate(calls, 1)
    ]
    return {"name": name, "ranks": ranks, "calls": told, "waits_for": waits_for} | {
        "waiting": waiting, "heard": heard or {},
    }  # fmt: skip


def write(folder: Path, rank: int, *comms: dict[str, Any], size: int = 3, job: str = "7") -> None:
    told = {"rank": rank, "size": size, "host": "node1", "pid": 100 + rank, "job": job}
    told |= {"time": float(job), "why": "waited too long", "communicators": list(comms)}
    told["ranks"] = [{"host": "node1", "pid": 100 + r} for r in range(size)]
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def words(folder: Path) -> str:
    return " | ".join(f.words for f in diagnosis.diagnose(reports.read(folder)))


def test_the_first_calls_that_differ(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("sum", "sum"))
    write(tmp_path, 1, comm("sum", "barrier"))
    write(tmp_path, 2, comm("sum", "sum"))
    (finding,) = diagnosis.diagnose(reports.read(tmp_path))
    assert finding.verdict == "problem"
    assert "communicator 'world'" in finding.words
    assert "#2: rank 1: barrier; ranks 0, 2: sum" in finding.words
    assert "rank 1 (process 101 on node1)" in finding.fix
    assert finding.facts["odd"] == [1]


def test_a_call_that_was_skipped(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, comm("a", "b", "c", "d"))
    write(tmp_path, 1, comm("a", "c", "d"))
    assert "rank 1 (process 101 on node1) skipped #2 b" in words(tmp_path)


def test_a_rank_that_has_not_come_and_waits_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("sum", "gather", waits_for=(1,)))
    write(tmp_path, 2, comm("sum", "gather", waits_for=(0,)))
    half = comm("max", waits_for=(2,), name="half", ranks=(1, 2))
    write(tmp_path, 1, comm("sum", waiting=False), half)
    text = words(tmp_path)
    assert "ranks 0, 2 wait in #2 gather, to which rank 1 has not come" in text
    assert "waits on communicator 'half' in #1 max" in text
    assert "rank 0 waits for rank 1 in #2 gather on 'world'" in text
    assert "rank 1 waits for rank 2 in #1 max on 'half'" in text
    assert "rank 2 waits for rank 0" in text


def test_a_rank_without_a_report(tmp_path: Path) -> None:
    heard = {"1": {"sequence": 1, "what": "the end of its program", "left": True}}
    for rank in (0, 2):
        write(tmp_path, rank, comm("sum", "sum", heard=heard))
    text = words(tmp_path)
    assert "to which rank 1 has not come; rank 1 (process 101 on node1) wrote no report" in text
    assert "1 ended the program" in text


def test_what_a_rank_without_a_report_told_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("sum", heard={"2": {"sequence": 1, "what": "max"}}))
    write(tmp_path, 1, comm("sum"))
    assert "#1: rank 2: max; ranks 0-1: sum" in words(tmp_path)


def test_inside_the_library_a_rank_waits_for_whoever_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("sum"))
    write(tmp_path, 1, comm("sum", waiting=False))
    write(tmp_path, 2, comm())
    assert diagnosis.waits(reports.read(tmp_path)) == {0: {2: "#1 sum on 'world'"}}


@pytest.mark.parametrize(
    ("edges", "path"),
    [
        ({}, []),
        ({0: [1], 1: [2]}, []),
        ({0: [1], 1: [0]}, [0, 1]),
        ({0: [1, 2], 1: [3], 2: [3], 3: [2]}, [3, 2]),
        ({5: [5]}, [5]),
    ],
)
def test_circles(edges: dict[int, list[int]], path: list[int]) -> None:
    assert diagnosis.circle({a: dict.fromkeys(bs, "") for a, bs in edges.items()}) == path


def test_no_quarrel(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, comm("sum", waiting=False))
    (finding,) = diagnosis.diagnose(reports.read(tmp_path))
    assert finding.verdict == "note"


def test_communicators_of_one_name_are_told_apart() -> None:
    told: dict[str, Any] = {"rank": 0, "host": "a", "pid": 1, "why": "", "job": "1", "time": 0.0}
    told |= {"size": 1, "ranks": [{"host": "a", "pid": 1}]}
    told["communicators"] = [comm("sum"), comm("max"), comm("min", name="tp")]
    standings = reports._report(told).standings
    assert [(name, alike) for name, _, alike in standings] == [
        ("world", 0),
        ("world", 1),
        ("tp", 0),
    ]
    assert isinstance(next(iter(standings.values())), Standing)


def test_only_the_newest_job_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("old"), job="6")
    write(tmp_path, 1, comm("new"), job="7")
    assert list(reports.read(tmp_path).of) == [1]


def test_the_table_shows_what_each_rank_waits_in(tmp_path: Path) -> None:
    write(tmp_path, 0, comm("sum", waits_for=(1,)), comm("max", waiting=False, name="tp"))
    write(tmp_path, 2, comm())
    rows = list(reports.rows(reports.read(tmp_path)))
    assert rows[0] == ("0", "100", "node1", "world", "#1 sum", "round 0 of 1, waits for rank 1")
    assert rows[1][-1] == "no report"
    assert rows[2][-1] == "no call yet"
    assert Call(0, "send(x)", "").text == "send(x)"
    assert Call(3, "sum(float32) by ring", "").short == "#3 sum"


def test_the_command_on_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, comm("sum"))
    write(tmp_path, 1, comm("max"))
    write(tmp_path, 2, comm("sum"))
    facts = tmp_path / "facts.json"
    assert run(Config(report=tmp_path, json=facts)) == 1
    assert "job 7, 3 ranks" in capsys.readouterr().out
    told = json.loads(facts.read_text())
    assert told["verdict"] == "problem"
    assert told["checks"][0]["facts"]["called"] == {"sum": [0, 2], "max": [1]}


def test_no_reports(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no reports"):
        run(Config(report=tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        run(Config(report=tmp_path / "none"))
    write(tmp_path, 0, comm("sum", heard={1: {"sequence": 1, "what": "sum"}}))
    whole = json.loads((tmp_path / "rank0.json").read_text())
    changes: list[dict[str, Any]] = [
        {name: value} for name in whole for value in (None, {}, "x", 7, [1])
    ]
    others = [{"rank": 5}, {"communicators": [{}]}, {"host": "\ud800"}]
    for text in ["{", "null", "[]", "{}", *(json.dumps(whole | c) for c in changes + others)]:
        (tmp_path / "rank0.json").write_text(text)
        try:
            run(Config(report=tmp_path))
        except ConfigError as error:
            assert "cannot be read" in str(error)  # noqa: PT017 (some of these can be)
    for text in ("{", "null", json.dumps(whole | {"time": None})):
        (tmp_path / "rank0.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            run(Config(report=tmp_path))


def test_which_rank_a_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPIPAR_REPORT_DIR", str(tmp_path))
    ranks = [{"host": "elsewhere", "pid": 5}, {"host": os.uname().nodename, "pid": os.getpid()}]
    told = {"job": "9", "started": time.time(), "ranks": ranks}
    (tmp_path / "ranks.json").write_text(json.dumps(told))
    assert run(Config(pid=os.getpid())) == 0
    assert "rank 1 of 2" in (said := capsys.readouterr().out)
    assert "it lives" in said
    assert run(Config(pid=5)) == 0
    assert "rank 0 of 2 on elsewhere, job 9" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="pid=6"):
        processes.tell(6)


def test_stale_files_are_those_that_nobody_uses(tmp_path: Path) -> None:
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "mpich_shm_young_0", "other"):
        (tmp_path / name).write_bytes(bytes(8192))
        os.utime(tmp_path / name, times=(1.0, 1.0))
    os.utime(tmp_path / "mpich_shm_young_0")
    with (tmp_path / "mpich_shm_alive_0").open():
        (dead,) = memory.stale(tmp_path)
    assert dead["name"] == "mpich_shm_dead_0"
    assert dead["bytes"] == 8192
