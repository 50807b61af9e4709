"""`mpipar doctor` in real jobs: a healthy one, a launcher that does not fit, and stuck ones."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch import launch, run

pytestmark = pytest.mark.launch

DOCTOR = ["-m", "mpipar.cli.main", "doctor"]
START = """
import os, sys, time, numpy as np, mpipar as mp
from mpi4py import MPI
comm = mp.Communicator(MPI.COMM_WORLD, name="job", timeout=4)
r = comm.rank
comm.all_reduce(np.ones(3))
"""
SKIP = {  # what goes wrong, and what doctor says of it
    "another call follows": (
        "if r != 1: comm.all_gather(np.ones(5))\ncomm.all_reduce(np.ones(3))\ncomm.barrier()",
        ["first calls that differ are #2: rank 1: all_reduce", "ranks 0, 2: all_gather",
         "Look at rank 1 (process"],
    ),
    "it waits on another communicator": (
        "half = mp.Communicator(MPI.COMM_WORLD.Split(int(r > 0)), name='half', timeout=4)\n"
        "if r != 1: comm.all_reduce(np.ones(5))\n"
        "half.all_reduce(np.ones(9))\ncomm.barrier()",
        ["ranks 0, 2 wait in #2 all_reduce", "to which rank 1 has not come",
         "waits on communicator 'half' in #1 all_reduce", "rank 1 waits for rank 2 in #1"],
    ),
    "it is busy": (
        "if r == 1: time.sleep(60)\ncomm.all_reduce(np.ones(5))",
        ["to which rank 1 has not come", "wrote no report"],
    ),
}  # fmt: skip


def flat(text: str) -> str:
    """Return the words of a table: lines joined, borders left out."""
    return re.sub(r"\s+", " ", re.sub(r"[│┃|]", " ", text))


def told_by(folder: Path) -> tuple[int, str]:
    result = run([sys.executable, *DOCTOR, "--report", folder, "--json", folder / "facts"], 60)
    found = json.loads((folder / "facts").read_text())["checks"]
    return result.returncode, " | ".join(f"{check['words']} -> {check['fix']}" for check in found)


@pytest.mark.parametrize("name", SKIP)
def test_a_rank_that_skips_a_collective_is_named(name: str, tmp_path: Path) -> None:
    code, words = SKIP[name]
    env = {"MPIPAR_REPORT_DIR": str(tmp_path)}
    job = launch(3, ["-c", START + code], timeout=60, env=env)
    assert job.returncode != 0
    assert f"mpipar doctor --report {tmp_path}" in job.stderr
    code_of_doctor, said = told_by(tmp_path)
    assert code_of_doctor == 1
    for word in words:
        assert word in said


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    env = {"MPIPAR_REPORT_DIR": str(tmp_path / "reports")}
    code = START + (
        "from mpipar.comm import report\n"
        "report.LONG_WAIT = 1.2\n"
        "folder = report.directory()\n"
        "if r == 1: time.sleep(2.5)\n"
        "comm.barrier()\n"
        "assert (folder / 'ranks.json').exists()\n"
        "assert (folder / 'rank0.json').exists()\n"  # it has waited for long
        "assert 'has waited for' in (folder / 'rank0.json').read_text()\n"
        "comm.barrier()"
    )
    job = launch(2, ["-c", code], timeout=60, env=env, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_killed_process_has_a_rank(tmp_path: Path) -> None:
    env = {"MPIPAR_REPORT_DIR": str(tmp_path)}
    code = START + "print(os.getpid(), flush=True) if r == 1 else None\ncomm.barrier()\n"
    code += f"if r == 1: os.kill(os.getpid(), {int(signal.SIGKILL)})\ntime.sleep(30)"
    start = time.monotonic()
    job = launch(3, ["-c", code], timeout=60, env=env)
    assert job.returncode != 0
    assert time.monotonic() - start < 30
    result = run([sys.executable, *DOCTOR, "--pid", job.stdout.split()[0]], 60, env=env)
    assert result.returncode == 0, result.stderr
    assert f"rank 1 of 3 on {os.uname().nodename}" in result.stdout
    assert "it is dead" in result.stdout


def test_a_healthy_job(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    env = {"MPIPAR_FAKE_NODES": "0,0,1"}
    flags = ["--dir", tmp_path, "--json", facts]
    result = launch(3, [*DOCTOR, *flags], timeout=100, env=env)
    found = json.loads(facts.read_text())
    assert result.returncode == int(found["verdict"] == "problem"), result.stderr
    checks = {check["name"]: check for check in found["checks"]}
    assert list(checks) == [
        *("MPI", "launcher", "cores", "threads", "shared memory", "GPU"),
        *("kernels", "links", "clocks", "speed", "checkpoints"),
    ]
    for name in ("MPI", "launcher", "kernels", "clocks", "checkpoints"):
        assert checks[name]["verdict"] == "ok", checks[name]
    (pair,) = checks["links"]["facts"]["between"]
    assert pair["nodes"] == [0, 1]
    assert pair["bytes_per_s"] > 0
    assert [one["rank"] for one in checks["launcher"]["facts"]["ranks"]] == [0, 1, 2]
    assert abs(checks["clocks"]["facts"][1]["offset_s"]) < 0.05
    assert "node 1" in flat(result.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]


def test_one_rank_without_mpiexec_and_a_launcher_that_does_not_fit(tmp_path: Path) -> None:
    env = {"SLURM_NTASKS": "4"}
    result = run([sys.executable, *DOCTOR, "--json", tmp_path / "x"], timeout=60, env=env)
    assert result.returncode == 1
    assert "SLURM_NTASKS=4, but MPI sees a world of 1 rank" in flat(result.stdout)
    assert "srun --mpi=" in flat(result.stdout)
    result = run([sys.executable, *DOCTOR, "--dir", "/proc/nowhere"], timeout=60)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "To look at several ranks: mpiexec" in flat(result.stdout)
    assert "Name a folder with --dir that all nodes share" in flat(result.stdout)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    result = launch(2, [*DOCTOR, "--json", tmp_path / "none" / "x"], timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("mpipar: error: json=") == 1
