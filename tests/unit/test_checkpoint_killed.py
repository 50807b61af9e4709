"""A job that is killed while it saves leaves a complete checkpoint: the latest that it finished."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from tests.launch import QUIET, ROOT, clean_environment, mpiexec

JOB = Path(__file__).with_name("checkpoint_job.py")
KILLS = int(os.environ.get("MPIPAR_KILLS", "2"))


def killed_job(folder: Path, how: str, seconds: float) -> int:
    """Run the job, kill all of it some time after its second step; return the last it printed."""
    environment = {**clean_environment(), **QUIET, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [*mpiexec(), "-n", "2", sys.executable, str(JOB), str(folder), how],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    with job:
        assert job.stdout is not None
        first = [job.stdout.readline() for _ in range(2)]
        time.sleep(seconds)
        for rank in ranks_of(job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        os.killpg(job.pid, signal.SIGKILL)
        rest = job.stdout.read().split()
    return int([*first, *rest][-1])


def ranks_of(launcher: int) -> list[int]:
    """Return the processes below a launcher: it may have given them sessions of their own."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = [launcher]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the ranks")
@pytest.mark.time_limit(60 + 10 * KILLS)
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_killed_save_leaves_the_latest_complete_one(tmp_path: Path, how: str) -> None:
    random = np.random.default_rng(os.getpid())
    with mp.Mesh(MPI.COMM_SELF) as mesh:
        for number in range(KILLS):
            folder = tmp_path / str(number)
            printed = killed_job(folder, how, float(random.uniform(0, 0.3)))
            arrays = {"w": np.zeros((400, 300)), "whole": np.zeros(100_000)}
            step = mp.load(folder, {"model": arrays}, mesh)["state"]["step"]
            behind = how == "async"  # the one that is printed is complete with the next
            assert printed - behind <= step <= printed + 1
            assert (arrays["w"] == step).all()
            assert (arrays["whole"] == step).all()
            mp.save(folder, {"model": arrays}, mesh, step=step + 1)
            assert not list(folder.glob(".step*"))
