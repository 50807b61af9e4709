"""`mpipar train` as a user starts it: what it writes, and how it fails."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from tests.launch import launch, mpiexec, run

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
    names = ["step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "comm_s", "skipped"]
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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--fsdp", "3", "--recompute"], "on 2 ranks: dp 2 x tp 1, fsdp 3, recompute\n"),
        (["--pp", "2", "--layers", "2", "--microbatches", "4"],
         "dp 1 x tp 1 x pp 2, schedule 1f1b of 4 micro-batches\n"),
        (["--cp", "2", "--cp-layout", "ulysses", "--accumulate", "2", "--experts", "4"],
         "dp 1 x tp 1 x cp 2, 2 micro-batches, cp layout ulysses, 4 experts, 2 for a token\n"),
        (["--tp", "2", "--sequence-parallel", "--overlap"],
         "dp 1 x tp 2, sequence-parallel, overlap\n"),
    ],
    ids=["fsdp", "pp", "cp", "tp"],
)  # fmt: skip
def test_the_layout_is_told_and_communication_is_part_of_a_step(
    flags: list[str], told: str, tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl"
    result = train(2, *flags, "--steps", "6", "--eval-every", "2", "--sample", "0", "--log", log)
    assert result.returncode == 0, result.stderr
    assert told in result.stdout
    for row in read(log):
        if "loss" in row:
            assert 0 < row["comm_s"] <= 4 * 16 / row["tokens_per_s"] * 1.001 + 1e-4


def test_no_terminal_no_bar_but_a_bar_in_one() -> None:
    command = [
        *mpiexec(),
        "-n",
        "2",
        sys.executable,
        *TRAIN,
        *TINY,
        "--steps",
        "3",
        "--sample",
        "0",
    ]
    result = run(["script", "-qec", " ".join(command), "/dev/null"], timeout=60)
    assert result.returncode == 0, result.stdout
    assert "\x1b[" in result.stdout
    assert "3/3" in result.stdout


def bad_tokens(folder: Path) -> Path:
    path = folder / "tokens.bin"
    np.full(500, 300, "<u2").tofile(path)
    return path


def assert_one_line(result: CompletedProcess[str], words: list[str]) -> None:
    assert result.returncode != 0
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    assert result.stderr.count("mpipar: error:") == 1, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def test_a_mesh_that_does_not_fit_is_one_line() -> None:
    assert_one_line(train(2, "--dp", "3"), ["dp=3", "number of ranks, 2", "-n 3"])


def test_a_loss_that_is_not_finite_is_one_line() -> None:
    flags = ["--steps", "5", "--lr", "1e30", "--clip", "0", "--warmup", "0"]
    result = train(2, *flags, "--max-skipped", "2")
    assert_one_line(result, ["not finite in step", "--lr"])
    assert "--dtype float32" not in result.stderr


SEVERAL = """
import json, sys
from mpi4py import MPI
from mpipar.cli.main import main

for flags in json.loads(sys.argv[1]):
    code = main(["train", *flags])
    codes = MPI.COMM_WORLD.gather(code)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(codes), file=sys.stderr, flush=True)
"""


def test_mistakes_are_one_line_and_code_2_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    cases: list[tuple[list[str], list[str]]] = [
        (["--tp", "2", "--heads", "1"], ["heads=1", "tp=2"]),
        (["--tp", "2", "--hidden", "33"], ["hidden=33", "tp=2", "32 or 34"]),
        (["--batch", "1"], ["batch=1", "dp=2", "--batch 2"]),
        (["--data", "none.txt"], ["data='none.txt'", "no such file"]),
        (["--data", "empty.txt"], ["data='empty.txt'", "empty"]),
        (["--data", "short.txt"], ["data='short.txt'", "9 tokens", "seq=16"]),
        (["--data", str(bad_tokens(tmp_path))], ["data=", "token 300", "--vocab 301"]),
        (["--log", "/nowhere/run.jsonl"], ["log=", "/nowhere"]),
        (["--device", "cuda"], ["device='cuda'", "--device cpu"]),
    ]
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    flags = json.dumps([[*TINY, *flags] for flags, _ in cases])
    result = launch(2, [script, flags], timeout=100, cwd=tmp_path)
    assert "Traceback" not in result.stderr, result.stderr
    lines = result.stderr.splitlines()
    assert lines[1::2] == ["[2, 2]"] * len(cases), result.stderr
    for line, (_, words) in zip(lines[::2], cases, strict=True):
        assert line.startswith("mpipar: error: "), line
        for word in words:
            assert word in line, (word, line)


def test_a_world_of_one_under_srun() -> None:
    env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    result = run([sys.executable, *TRAIN, *TINY], timeout=60, env=env)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for word in ("SLURM_NTASKS=4", "world of 1 rank", "--mpi=", "mpiexec -n 4"):
        assert word in result.stderr
    result = run([sys.executable, *TRAIN, *TINY], timeout=60, env={**env, "SLURM_PROCID": "2"})
    assert (result.returncode, result.stderr) == (2, "")


BROKEN = """
import sys
import numpy as np
from mpi4py import MPI
from mpipar.train import step
from mpipar.cli.train import Config, run

count = step.count_tokens

def broken(parts, held):
    if MPI.COMM_WORLD.rank == 1:
        {fault}
    return count(parts, held)

step.count_tokens = broken
config = Config(layers=1, dim=32, heads=2, seq=16, batch=4, check_collectives=True)
sys.exit(run(config, lambda usual: config))
"""


def broken(folder: Path, fault: str) -> CompletedProcess[str]:
    """Run a job of three ranks in which rank 1 does something else than the others."""
    script = folder / "broken.py"
    script.write_text(BROKEN.format(fault=fault))
    result = launch(3, [script], timeout=30)
    assert result.returncode != 0
    return result


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    result = broken(tmp_path, 'raise RuntimeError("the disk fell out")')
    assert "rank 1" in result.stderr
    assert "the disk fell out" in result.stderr


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("held.data.all_reduce(np.zeros(2, np.int64))", ["rank 1", "shape"]),
        ("held.data.all_reduce(np.zeros(1, np.float32))", ["rank 1", "float32", "int64"]),
        ("held.data.all_gather(np.zeros(1, np.int64))", ["rank 1", "all_gather", "all_reduce"]),
    ],
    ids=["shape", "dtype", "order"],
)
def test_collectives_that_do_not_fit_are_named(
    tmp_path: Path, fault: str, words: list[str]
) -> None:
    result = broken(tmp_path, fault)
    assert "Traceback" not in result.stderr, result.stderr
    assert "mpipar: error: " in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_an_output_never_costs_a_file_that_was_there(tmp_path: Path) -> None:
    text, old = tmp_path / "my.txt", tmp_path / "old.jsonl"
    text.write_text("hello world " * 100)
    old.write_text("old\n")
    (tmp_path / "same.txt").symlink_to(text)
    assert_one_line(train(1, "--data", text, "--log", tmp_path / "same.txt"), ["part of data"])
    assert_one_line(train(1, "--data", tmp_path / "none", "--log", old), ["no such file"])
    assert_one_line(train(1, "--data", tmp_path, "--log", tmp_path / "new"), ["part of data"])
    assert (text.stat().st_size, old.read_text()) == (1200, "old\n")


@pytest.mark.parametrize("flag", ["log", "plot"])
def test_a_full_disk_is_one_line_and_the_end_of_all_ranks(tmp_path: Path, flag: str) -> None:
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    result = train(2, "--steps", "2", "--sample", "0", f"--{flag}", full)
    assert_one_line(result, [f"{flag}=", "No space left", "rank 0"])
    assert result.returncode == 2


def test_a_reader_that_leaves_and_a_full_standard_output() -> None:
    line = " ".join([sys.executable, *TRAIN, *TINY, "--steps 2 --sample 0"])
    full = run(["sh", "-c", f"{line} > /dev/full"], timeout=60)
    assert full.returncode == 2
    assert_one_line(full, ["standard output", "No space left"])
    head = run(["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"], timeout=60)
    assert (head.returncode, head.stderr) == (0, "")


@pytest.mark.parametrize("bad", ["train --steps=abc", "train --help", "trian"])
def test_a_rank_with_nothing_to_run_ends_the_job(bad: str) -> None:
    program = [sys.executable, "-m", "mpipar.cli.main"]
    mine = [*program, "train", *TINY]
    command = [*mpiexec(), "-n", "1", *mine, ":", "-n", "1", *program, *bad.split()]
    result = run(command, timeout=60)
    assert result.returncode != 0
    assert "mpipar: error: rank 1 on " in result.stderr
