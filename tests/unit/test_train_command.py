"""`mpipar train` as a user starts it: what it writes, and how it fails."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from tests.launch import launch, run

pytestmark = pytest.mark.launch

TRAIN = ["-m", "mpipar.cli.main", "train"]
TINY = ["--layers", "1", "--dim", "32", "--heads", "2", "--seq", "16", "--batch", "4"]


def train(ranks: int, *flags: str | Path, **env: str) -> CompletedProcess[str]:
    return launch(ranks, [*TRAIN, *TINY, *flags], timeout=100, env=env)


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_writes_log_plot_and_sample(tmp_path: Path) -> None:
    log, plot = tmp_path / "run.jsonl", tmp_path / "loss.png"
    flags = ["--steps", "30", "--eval-every", "15", "--lr", "1e-2", "--log", log, "--plot", plot]
    result = train(2, "--tp", "2", *flags, "--sample", "20")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = read(log)
    steps = [row for row in rows if "loss" in row]
    names = ["step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "comm_s"]
    assert all(list(row) == names for row in steps)
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert [row["step"] for row in rows if "val_loss" in row] == [15, 30]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(row["tokens_per_s"] > 0 and row["mfu"] > 0 and row["comm_s"] > 0 for row in steps)
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in ("dp 1 x tp 2", "step 30/30", "tokens/s", "MFU", "communication", "sample",
                  "validation loss", str(log), str(plot)):  # fmt: skip
        assert words in result.stdout
    assert "\x1b" not in result.stdout  # plain lines: nobody watches


def test_no_terminal_no_bar_but_a_bar_in_one() -> None:
    command = [*mpiexec_line(2), *TRAIN, *TINY, "--steps", "3", "--sample", "0"]
    result = run(["script", "-qec", " ".join(command), "/dev/null"], timeout=60)
    assert result.returncode == 0, result.stdout
    assert "\x1b[" in result.stdout
    assert "3/3" in result.stdout


def mpiexec_line(ranks: int) -> list[str]:
    import sys

    from tests.launch import mpiexec

    return [*mpiexec(), "-n", str(ranks), sys.executable]


def bad_tokens(folder: Path) -> Path:
    path = folder / "tokens.bin"
    np.full(500, 300, "<u2").tofile(path)
    return path


def test_mistakes_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    cases: list[tuple[list[str | Path], list[str]]] = [
        (["--dp", "3"], ["dp=3", "number of ranks, 2"]),
        (["--tp", "2", "--heads", "1"], ["heads=1", "tp=2"]),
        (["--data", tmp_path / "none.txt"], ["data=", "none.txt", "no such file"]),
        (["--data", empty], ["data=", "empty.txt", "empty"]),
        (["--data", bad_tokens(tmp_path)], ["data=", "token 300", "--vocab 301"]),
        (["--lr", "1e30", "--clip", "0", "--warmup", "0"], ["not finite", "--lr"]),
        (["--log", "/nowhere/run.jsonl"], ["log=", "/nowhere"]),
    ]
    for flags, words in cases:
        result = train(2, "--steps", "5", *flags)
        assert result.returncode != 0, flags
        assert "Traceback" not in result.stderr + result.stdout, result.stderr
        assert result.stderr.count("mpipar: error:") == 1, result.stderr
        for word in words:
            assert word in result.stderr, (word, result.stderr)


def test_a_world_of_one_under_srun() -> None:
    import sys

    env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    result = run([sys.executable, *TRAIN, *TINY], timeout=60, env=env)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for word in ("SLURM_NTASKS=4", "world of 1 rank", "--mpi=", "mpiexec -n 4"):
        assert word in result.stderr
    result = run([sys.executable, *TRAIN, *TINY], timeout=60, env={**env, "SLURM_PROCID": "2"})
    assert (result.returncode, result.stderr) == (2, "")


FAILS_ON_RANK_1 = """
import sys
from mpi4py import MPI
from mpipar.train import loop
from mpipar.cli.train import Config, run

count = loop.count_tokens

def broken(parts, mesh):
    if MPI.COMM_WORLD.rank == 1:
        raise RuntimeError("the disk fell out")
    return count(parts, mesh)

loop.count_tokens = broken
sys.exit(run(Config(layers=1, dim=32, heads=2, seq=16, batch=4)))
"""


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS_ON_RANK_1)
    result = launch(3, [script], timeout=30)
    assert result.returncode != 0
    assert "rank 1" in result.stderr
    assert "the disk fell out" in result.stderr
