"""Signals to jobs of `mpipar train`, and ranks that fail or are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import QUIET, ROOT, clean_environment, launch, mpiexec

TRAIN = ["-m", "mpipar.cli.main", "train", "--layers", "2", "--dim", "32", "--seq", "16"]
TRAIN += ["--batch", "4", "--steps", "100000", "--sample", "0"]

pytestmark = pytest.mark.launch
assert launch  # marks this module as one that starts jobs


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
    with job(2, tmp_path, "--save", str(tmp_path / "run")) as run:
        run.wait_for(3)
        run.process.send_signal(signal.SIGUSR1)
        code, out, err = run.end()
        assert code == 0, err
        last = run.rows()[-1]
        assert last["stopped"] == "SIGUSR1"
        assert last["saved"].endswith(f"step-{last['step']:08d}")
        assert f"stopped by SIGUSR1 after step {last['step']}/100000: saved in" in out
        assert out.count("stopped by") == 1


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    with job(2, tmp_path) as run:
        run.wait_for(2)
        stuck = run.pid(0)
        os.kill(stuck, signal.SIGSTOP)  # so that the step does not end
        os.kill(run.pid(1), signal.SIGTERM)
        time.sleep(1.5)
        os.kill(run.pid(1), signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):  # the launcher may have been faster
            time.sleep(0.2)
            os.kill(stuck, signal.SIGCONT)
        code, _, err = run.end()
        assert code != 0
        assert "rank 1 on" in err
        assert "ends at once: SIGTERM came after" in err
