"""`mpipar schedule` for pipelines, called in this process."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpipar.cli import main as main_module
from mpipar.cli.main import main
from mpipar.schedule.pipeline import draw, load, make, pipelines, to_csv
from mpipar.train.launch import RANK_VARIABLES

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command see itself as started alone, also where the tests run on several ranks."""
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(main_module, "_many_ranks", lambda: False)


def schedule(*words: str | Path) -> int:
    line = [part for word in words for part in (word.split() if isinstance(word, str) else [word])]
    return main(["schedule", *map(str, line)])


def test_show(capsys: Captured) -> None:
    assert schedule("show 1f1b -p 4 -m 8") == 0
    out = capsys.readouterr().out
    assert out.endswith(draw(make("1f1b", 4, 8)) + "\n")
    assert "rank 3  .  .  .  F0 B0 F1 B1" in out
    assert schedule("show interleaved -p 2 -m 3 --chunks 3 --width 60") == 0
    assert capsys.readouterr().out.endswith(draw(make("interleaved", 2, 3, 3), width=60) + "\n")
    assert schedule("show pipeline -p 3 -m 2") == 0
    out = capsys.readouterr().out
    assert all(f"{name} on 3 ranks: " in out for name in pipelines())


def test_files(tmp_path: Path, capsys: Captured) -> None:
    svg, csv = tmp_path / "picture.svg", tmp_path / "own.csv"
    assert schedule("show zbv -p 2 -m 4 --svg", svg, "--csv", csv) == 0
    assert capsys.readouterr().out == f"wrote {svg}\nwrote {csv}\n"
    ElementTree.parse(svg)
    assert load(csv).actions == make("zbv", 2, 4).actions
    assert schedule("show", csv) == 0
    assert "own.csv on 2 ranks: 4 stages, 4 micro-batches" in capsys.readouterr().out
    assert schedule("verify", csv) == 0
    assert re.search(r"own.csv +1 +48 +16 +4\nall proven", capsys.readouterr().out)
    assert schedule("simulate", csv) == 0
    assert "own.csv" in capsys.readouterr().out
    assert schedule("draw 1f1b -p 2 -m 2 --svg", svg) == 0
    ElementTree.parse(svg)


def test_a_file_with_a_fault(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(to_csv(make("1f1b", 4, 8)).replace("2B4", "2B3"))
    for command, code in (("verify", 1), ("show", 2), ("simulate", 2), ("draw", 2)):
        assert schedule(command, path) == code
        lines = capsys.readouterr().err.split("\n")
        assert lines[0].startswith("mpipar: error: schedule='bad.csv': 2B3 is doubled on rank 2")
        assert lines[3].startswith("rank 2 |...")
        assert lines[3].count("[2B3]") == 2


def test_verify(capsys: Captured) -> None:
    assert schedule("verify pipeline -p 1..4 -m 1,3,8") == 0
    out = capsys.readouterr().out
    for name in pipelines():
        count = 36 if name == "interleaved" else 12
        assert re.search(rf"^{name} +{count} +[\d,]+ +[\d,]+ +\d+$", out, re.MULTILINE)
    assert "all proven" in out
    assert schedule("verify interleaved -p 3 -m 5 --chunks 4") == 0
    assert re.search(r"interleaved +1 +120 +110 ", capsys.readouterr().out)


def test_simulate(capsys: Captured) -> None:
    assert schedule("simulate pipeline -p 4 -m 8 --forward 1e-3 --backward 1e-3 --weight 1e-3") == 0
    out = capsys.readouterr().out
    assert "4 ranks, 8 micro-batches; a micro-batch on a rank: forward 1 ms, backward 1 ms" in out
    assert re.search(r"gpipe +33 ms +27.3 % +8 8 8 8\n", out)
    assert re.search(r"1f1b +33 ms +27.3 % +4 3 2 1\n", out)
    assert re.search(r"interleaved +28.5 ms +15.8 % +5.5 4.5 3.5 2.5\n", out)
    assert re.search(r"zb1p +27 ms +11.1 % +4 4 4 4\n", out)
    assert re.search(r"zbv +25.5 ms +5.9 % +4 4 4 4\n", out)


def test_draw(capsys: Captured) -> None:
    assert schedule("draw zb1p -p 2 -m 2 --send 0.5 --width 70") == 0
    out = capsys.readouterr().out
    assert out.startswith("zb1p on 2 ranks, 2 micro-batches: 8 s, idle 25.0 %\n")
    assert "|0F0-" in out
    assert max(map(len, out.split("\n"))) <= 70


MISTAKES = {
    "show 1f2b": ["collective='1f2b'", "the pipelines gpipe, 1f1b, interleaved, zb1p, zbv"],
    "show 1f1b -p 0": ["p=0", "at least one rank"],
    "show 1f1b -m 0": ["microbatches=0"],
    "show gpipe --chunks 2": ["chunks=2", "gpipe has 1 on each rank"],
    "show pipeline --csv x.csv": ["shows one schedule", "Say gpipe"],
    "show 1f1b --csv /nowhere/x.csv": ["csv='/nowhere/x.csv'", "no folder /nowhere"],
    "draw pipeline": ["shows one schedule"],
    "simulate none.csv": ["schedule='none.csv'", "cannot be read"],
    "simulate 1f1b --weight -1": ["weight=-1.0", "not negative"],
    "show 1f1b -p 1000 -m 1000": ["microbatches=1000", "at most 100,000"],
    "simulate 1f1b -m 100000000000": ["microbatches=100000000000", "at most 500,000"],
    "simulate 1f1b -p 100000000000": ["p=100000000000"],
    "simulate 1f1b --forward inf": ["forward=inf", "finite"],
    "verify 1f1b -p 1..10000": ["ranks=10000", "at most 20,000,000"],
    "verify 1f1b --jobs 0": ["jobs=0"],
    "verify 1f1b --chunks 2": ["chunks=2"],
    "show 1f1b --width -5": ["width=-5"],
    "verify 1f1b -m 3..1": ["microbatches='3..1'", "1..64"],
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line: str, capsys: Captured) -> None:
    assert schedule(line) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("mpipar: error: ")
    assert error.count("\n") == 1
    for words in MISTAKES[line]:
        assert words in error
