"""The file that `bench collectives --tune` writes: what is none is one error on every rank."""

from pathlib import Path

import pytest

from mpipar.comm import choice
from mpipar.errors import ConfigError
from tests.launch import launch

TABLE = '{{"rows": [{{"collective": "all_reduce", "ranks": 2, "choices": [[null, "{}"]]}}]}}'


@pytest.mark.parametrize(
    "text", ["garbage", "[]", '{"rows": [{"collective": "all_reduce"}]}', TABLE.format("nope")]
)
def test_a_file_that_is_no_tuning_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(ConfigError, match=r"MPIPAR_TUNING=.*--tune"):
        choice.read_table(tmp_path / "tuning.json")


def test_a_bad_tuning_table_is_one_line_of_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text(TABLE.format("nope"))
    env = {"MPIPAR_TUNING": str(tmp_path / "tuning.json")}
    result = launch(2, ["-m", "mpipar", "train", "--steps", "1"], timeout=60, env=env)
    assert result.returncode == 2
    assert result.stderr.count("mpipar: error: MPIPAR_TUNING=") == 1
    assert "no algorithm 'nope' for 'all_reduce'" in result.stderr
    assert "Traceback" not in result.stderr
