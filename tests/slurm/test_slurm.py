"""Every script of slurm/, submitted to a Slurm of two nodes of two ranks each; one past its limit.

Skipped, with the reason, where a Slurm is not to be had.  There is no GPU here: the GPU script runs
with DEVICE=cpu, and what is looked at is that each rank gets a device of its own.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file

from tests.launch import ROOT
from tests.slurm.cluster import NODES, Cluster, slurm, why_not

pytestmark = [pytest.mark.launch, pytest.mark.time_limit(200)]

STEPS = 110
TINY = (
    *("--dim", 16, "--heads", 2, "--layers", 1, "--seq", 16, "--batch", 4, "--sample", 0),
    *("--eval-every", 0, "--eval-batches", 1, "--reproducible"),
)
SLOW = {"SLOW": "0.6"}  # seconds a step: the first run of a job would go past a minute
SHORT = {"TRAIN_STEPS": "3"}
SCRIPTS = {"bench_collectives", "doctor", "train_cpu", "train_gpu", "train_mpirun", "train_requeue"}

Jobs = dict[str, str]  # what it is: its number


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if MPI.COMM_WORLD.size > 1:
        reason = "it wants the machine for itself: python -m pytest tests/slurm"
    if reason:
        pytest.skip(reason)
    with slurm() as made:
        yield made


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> Jobs:
    """All of them, since the longest one mostly waits."""
    submit, long = cluster.submit, {"TRAIN_STEPS": str(STEPS)}
    limit = ["--time=1", "--signal=B:USR1@15"]
    sizes = ("--sizes", 2**20, "--algorithms", "ring")
    return {
        "limit": submit("train_requeue", *TINY, flags=limit, env=long | SLOW),
        "cpu": submit("train_cpu", *TINY, env=long),
        "mpirun": submit("train_mpirun", *TINY, env=SHORT),
        "gpu": submit(
            *("train_gpu", *TINY), env={**SHORT, "DEVICE": "cpu"},
            flags=["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"],
        ),
        "signal": submit("train_requeue", *TINY, env=long | SLOW | {"LAUNCHER": "mpirun"}),
        "wrong": submit("train_requeue", "--dim", 17, env=SHORT),
        "bench": submit("bench_collectives", *sizes, flags=["--exclusive=user"]),
        "doctor": submit("doctor"),
        "mismatch": submit("doctor", env={"MPI_TYPE": "none"}),
    }  # fmt: skip


def run_dir(cluster: Cluster, job: str) -> Path:
    return cluster.folder / f"{cluster.show(job)['JobName']}-{job}"


def finished(cluster: Cluster, job: str) -> dict[str, str]:
    """Wait for a job that must end well."""
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), cluster.output(job)
    return facts


def losses(cluster: Cluster, job: str) -> list[tuple[int, float]]:
    """Return the steps of a job's log, each with its loss."""
    rows = map(json.loads, (run_dir(cluster, job) / "log.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def check_checkpoint(cluster: Cluster, job: str, steps: int) -> None:
    """Open the newest checkpoint with the safetensors library."""
    folder = run_dir(cluster, job) / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip()
    assert json.loads((newest / "state.json").read_text())["step"] == steps
    arrays = load_file(newest / "model.safetensors")
    assert sum(array.size for array in arrays.values()) > 7000
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_every_script_is_submitted() -> None:
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} == SCRIPTS


@pytest.mark.parametrize("name", ["signal", "limit"])
def test_a_signal_saves_and_requeues(cluster: Cluster, jobs: Jobs, name: str) -> None:
    """Ours goes through mpiexec, that of the limit through srun; they are looked at again below."""
    job, end = jobs[name], time.monotonic() + 90
    log = run_dir(cluster, job) / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert time.monotonic() < end, cluster.output(job)
        time.sleep(0.2)
    if name == "signal":
        cluster.call("scancel", "--batch", "--signal=USR1", job)
    while cluster.show(job)["Restarts"] == "0":
        assert time.monotonic() < end, cluster.output(job)
        time.sleep(0.2)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # the second run may be slow


@pytest.mark.parametrize(("name", "steps"), [("cpu", STEPS), ("mpirun", 3), ("gpu", 3)])
def test_training_uses_both_nodes_and_saves(
    cluster: Cluster, jobs: Jobs, name: str, steps: int
) -> None:
    finished(cluster, jobs[name])
    ranks = cluster.ranks(jobs[name])
    assert [(rank.number, rank.node) for rank in ranks] == list(enumerate(np.repeat(NODES, 2)))
    if name == "gpu":
        for node in NODES:  # each rank of a node sees another one
            assert {rank.gpus for rank in ranks if rank.node == node} == {"0", "1"}
    check_checkpoint(cluster, jobs[name], steps)


def test_the_array_measures_each_number_of_nodes(cluster: Cluster, jobs: Jobs) -> None:
    for nodes in (1, 2):
        finished(cluster, f"{jobs['bench']}_{nodes}")
        found = json.loads((run_dir(cluster, jobs["bench"]) / f"nodes-{nodes}.json").read_text())
        assert {row["ranks"] for row in found["rows"]} == {2 * nodes}


def test_doctor_sees_the_nodes_and_the_wrong_protocol(cluster: Cluster, jobs: Jobs) -> None:
    cluster.wait(jobs["doctor"])
    found = json.loads((cluster.folder / f"doctor-{jobs['doctor']}.json").read_text())
    (launcher,) = [check for check in found["checks"] if check["name"] == "launcher"]
    assert launcher["verdict"] == "ok"
    assert [rank["host"] for rank in launcher["facts"]["ranks"]] == ["n1", "n1", "n2", "n2"]
    assert cluster.wait(jobs["mismatch"])["JobState"] == "FAILED"
    assert "srun --mpi=pmi2" in cluster.output(jobs["mismatch"])


@pytest.mark.parametrize("name", ["signal", "limit"])
def test_a_requeued_job_ends_as_one_that_never_stopped(
    cluster: Cluster, jobs: Jobs, name: str
) -> None:
    job = jobs[name]
    facts = finished(cluster, job)
    assert int(facts["Restarts"]) >= 1
    output = cluster.output(job)
    assert "back into the queue" in output
    assert f"all {STEPS} steps are done" in output
    check_checkpoint(cluster, job, STEPS)
    finished(cluster, jobs["cpu"])
    assert losses(cluster, job) == losses(cluster, jobs["cpu"])
    assert {rank.node for rank in cluster.ranks(job)} == set(NODES)


def test_a_job_that_fails_is_not_requeued(cluster: Cluster, jobs: Jobs) -> None:
    facts = cluster.wait(jobs["wrong"])
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0")
    assert "not requeued" in cluster.output(jobs["wrong"])
