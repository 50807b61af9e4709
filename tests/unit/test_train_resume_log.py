"""The log of a run that goes on has each step once."""

from pathlib import Path
from typing import Any, cast

from mpipar.train.report import Facts, JsonLog


def facts(first: int) -> Facts:
    corpus = cast(Any, None)
    return Facts(1, 1.0, 1.0, "dp 1 x tp 1", 1, corpus, first)


def test_steps_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 3}\n{"step": 3}\n{"st')
    log = JsonLog(str(path), goes_on=True)
    log.open()
    log.begin(facts(first=3))
    log.step({"step": 3, "loss": 1.0})
    log.close()
    lines = path.read_text().splitlines()
    assert lines[:3] == ['{"step": 1}', '{"step": 2}', '{"step": 2, "val_loss": 3}']
    assert lines[3:] == ['{"step": 3, "loss": 1.0}']


def test_a_new_run_empties_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n')
    log = JsonLog(str(path))
    log.open()
    log.begin(facts(first=1))
    log.close()
    assert path.read_text() == ""
