"""Signals to jobs of `mpipar train`, and ranks that fail or are killed."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import QUIET, ROOT, clean_environment, launch, mpiexec, run

TRAIN = ["-m", "mpipar.cli.main", "train", "--layers", "2", "--dim", "32", "--seq", "16"]
TRAIN += ["--batch", "4", "--steps", "100000", "--sample", "0"]

pytestmark = pytest.mark.launch


class Job:
    """A job that runs beside the test."""

    def __init__(self, ranks: int, folder: Path, *flags: str) -> None:
        """Start it; wait until it has taken some steps."""
        self.folder, self.log = folder, folder / "log.jsonl"
        env = {**clean_environment(), **QUIET, "PYTHONPATH": str(ROOT)}
        env["MPIPAR_REPORT_DIR"] = str(folder)
        self.process = subprocess.Popen(
            [*mpiexec(), "-n", str(ranks), sys.executable, *TRAIN, "--log", str(self.log), *flags],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, steps: int) -> None:
        """Return when so many lines are in the log."""
        deadline = time.monotonic() + 60
        while not self.log.exists() or len(self.log.read_text().splitlines()) < steps:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int(json.loads((self.folder / "ranks.json").read_text())["ranks"][rank]["pid"])

    def end(self) -> tuple[int, str, str]:
        """Return exit code and outputs."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextlib.contextmanager
def job(ranks: int, folder: Path, *flags: str) -> Iterator[Job]:
    """Start a job, and leave none behind."""
    started = Job(ranks, folder, *flags)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def test_mpiexec_passes_a_signal_on(tmp_path: Path) -> None:
    with job(2, tmp_path, "--save", str(tmp_path / "run")) as train:
        train.wait_for(3)
        train.process.send_signal(signal.SIGUSR1)
        code, out, err = train.end()
        assert code == 0, err
        last = train.rows()[-1]
        assert last["stopped"] == "SIGUSR1"
        assert last["saved"].endswith(f"step-{last['step']:08d}")
        assert f"stopped by SIGUSR1 after step {last['step']}/100000: saved in" in out
        assert out.count("stopped by") == 1


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    with job(2, tmp_path) as train:
        train.wait_for(2)
        stuck = train.pid(0)
        os.kill(stuck, signal.SIGSTOP)  # so that the step does not end
        os.kill(train.pid(1), signal.SIGTERM)
        time.sleep(1.5)
        os.kill(train.pid(1), signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):  # the launcher may have been faster
            time.sleep(0.2)
            os.kill(stuck, signal.SIGCONT)
        code, _, err = train.end()
        assert code != 0
        assert "rank 1 on" in err
        assert "ends at once: SIGTERM came after" in err


FAIL = """
import os, sys
import mpi4py
mpi4py.rc(initialize=False)
from mpipar.train import data, held, loop
kind, calls = sys.argv[1], []
def fail(original, what):
    def call(*args, **kwargs):
        from mpi4py import MPI
        calls.append(1)
        if MPI.COMM_WORLD.rank == 1 and len(calls) == 3:
            what()
        return original(*args, **kwargs)
    return call
def raising(error):
    def what():
        raise error
    return what
def kill():
    os.kill(os.getpid(), 9)
if kind == "forward":
    held.token_share = fail(held.token_share, raising(RuntimeError("broken model")))
elif kind == "data":
    data.Batches.step = fail(data.Batches.step, raising(OSError("disk is gone")))
elif kind == "memory":
    loop.train_step = fail(loop.train_step, raising(MemoryError("17 GiB")))
elif kind == "killed":
    held.token_share = fail(held.token_share, kill)
from mpipar.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("forward", " failed and ends the job: RuntimeError: broken model"),
        ("data", " failed and ends the job: OSError: disk is gone"),
        ("memory", ": the memory is full (17 GiB)"),
    ],
)
def test_an_error_of_one_rank_ends_the_job_by_name(kind: str, cause: str, tmp_path: Path) -> None:
    failed = launch(2, ["-c", FAIL, kind, *TRAIN[2:]], timeout=60, cwd=tmp_path)
    assert failed.returncode != 0
    assert f"rank 1 on {platform.node()}{cause}" in failed.stderr


def test_a_killed_rank_ends_the_job_and_can_be_named(tmp_path: Path) -> None:
    env, save = {"MPIPAR_REPORT_DIR": str(tmp_path)}, ["--save", "run", "--save-every", "1"]
    begun = time.monotonic()
    job = launch(2, ["-c", FAIL, "killed", *TRAIN[2:], *save], timeout=60, cwd=tmp_path, env=env)
    assert job.returncode != 0
    assert time.monotonic() - begun < 45  # the start included
    pid = json.loads((tmp_path / "ranks.json").read_text())["ranks"][1]["pid"]
    told = run([sys.executable, "-m", "mpipar.cli.main", "doctor", "--pid", str(pid)], 60, env=env)
    assert "rank 1" in told.stdout
    flags = [*TRAIN[:3], "--steps", "4", "--resume", "run", "--log", "log", "--sample", "0"]
    again = launch(2, flags, timeout=60, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row][-1] == 4
