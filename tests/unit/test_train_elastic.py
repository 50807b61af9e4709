"""`mpipar train --elastic`: who goes on, and jobs of Open MPI in which a rank is killed."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mpipar.train.elastic import Survivor, arrange
from tests.launch import launch, mpiexec, run

pytestmark = pytest.mark.launch

KILL = """
import os, sys
import mpi4py
mpi4py.rc(initialize=False)
from mpipar.train import held
who, when = int(sys.argv[1]), int(sys.argv[2])
share, calls = held.token_share, []
def token_share(*args):  # between forward and backward
    from mpi4py import MPI
    calls.append(1)
    if MPI.COMM_WORLD.rank == who and len(calls) == when:
        os.kill(os.getpid(), 9)
    return share(*args)
held.token_share = token_share
from mpipar.cli.main import main
raise SystemExit(main(sys.argv[3:]))
"""
TRAIN = ["train", "--layers", "2", "--dim", "32", "--heads", "4", "--seq", "16", "--batch", "12"]
TRAIN += ["--steps", "6", "--dtype", "float64", "--sample", "0", "--eval-every", "0"]
ULFM = ("--with-ft", "ulfm")
is_open_mpi = len(mpiexec()) > 1
needs_ulfm = pytest.mark.skipif(not is_open_mpi, reason="ULFM is Open MPI's")


def living(dp: int, tp: int, dead: set[int], done: int = 3) -> list[Survivor]:
    """Return what is left of dp x tp ranks."""
    return [Survivor(r, (0, 0, r % tp), done) for r in range(dp * tp) if r not in dead]


def test_dp_shrinks_and_the_rest_stays_whole() -> None:
    cases: list[tuple[int, int, set[int], list[int]]] = [
        (4, 1, {2}, [0, 1, 3]),
        (2, 2, {3}, [0, 1]),  # rank 2 leaves
        (2, 2, {1}, [0, 3]),
        (3, 2, {0, 3}, [2, 1, 4, 5]),
    ]
    for dp, tp, dead, expected in cases:
        told = living(dp, tp, dead)
        order, keeps = arrange(told, (1, 1, tp), whole=True)
        assert keeps
        assert [told[i].rank for i in order] == expected
        assert [told[i].place[2] for i in order] == [*range(tp)] * (len(order) // tp)


def test_without_a_replica_all_load() -> None:
    assert arrange(living(2, 2, {1, 3}), (1, 1, 2), whole=True) == ([0, 1], False)
    assert arrange(living(4, 1, {2}), (1, 1, 1), whole=False) == ([0, 1, 2], False)
    assert arrange(living(1, 2, {1}), (1, 1, 2), whole=True) == ([], False)
    uneven = [*living(2, 1, {1}), Survivor(1, (0, 0, 0), 4)]
    assert arrange(uneven, (1, 1, 1), whole=True) == ([0, 1], False)


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


@needs_ulfm
@pytest.mark.parametrize(
    ("mesh", "who", "left"),
    [([], 2, []), (["--tp", "2"], 1, ["--tp", "2"]), (["--fsdp", "3"], 0, ["--fsdp", "3"])],
)
def test_the_others_go_on(tmp_path: Path, mesh: list[str], who: int, left: list[str]) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    save = ["--save", str(folder), "--save-every", "1"]
    flags = [*TRAIN, *mesh, *save, "--elastic", "--log", str(log)]
    job = launch(4, ["-c", KILL, str(who), "4", *flags], timeout=90, flags=ULFM)
    assert job.returncode == 0, job.stderr
    assert f"mpipar: lost rank {who} (process " in job.stderr
    ranks = 2 if "--tp" in mesh else 3
    again = tmp_path / "again"
    flags = [*TRAIN, *left, "--resume", str(folder / "step-00000003"), "--log", str(again)]
    smaller = launch(ranks, ["-m", "mpipar.cli.main", *flags], timeout=90)
    assert smaller.returncode == 0, smaller.stderr
    assert [row["step"] for row in rows(log)][-3:] == [4, 5, 6]
    for row, right in zip(rows(log)[-3:], rows(again), strict=True):
        assert abs(row["loss"] - right["loss"]) <= 1e-10 * right["loss"]


@needs_ulfm
@pytest.mark.parametrize(("who", "code"), [("1", 0), ("0123", 1)])
def test_a_rank_that_raises_is_gone_too(who: str, code: int) -> None:
    """Nobody hears of MPI_Abort there; and if all raise, the exit code says so."""
    raising = KILL.replace("rank == who", f"rank in {[*map(int, who)]}")
    raising = raising.replace("os.kill(os.getpid(), 9)", "raise RuntimeError('broken')")
    flags = [*TRAIN, "--elastic"]
    job = launch(4, ["-c", raising, "0", "4", *flags], timeout=60, flags=ULFM)
    assert job.returncode == code, job.stderr
    words = "all 4 ranks failed and end" if code else "failed and leaves"
    assert f"{words} the job: RuntimeError: broken" in job.stderr
    assert job.stderr.count("Traceback") == 1


def test_what_it_needs_is_said() -> None:
    job = launch(2, ["-m", "mpipar.cli.main", *TRAIN, "--elastic"], timeout=60)
    assert job.returncode == 2
    assert "elastic=True: it needs Open MPI started with --with-ft ulfm" in job.stderr
    assert "--with-ft ulfm mpipar train --elastic" in job.stderr


def test_an_end_that_hangs_is_cut_short() -> None:
    """What is registered first runs last: the sleep stands for an MPI_Finalize that waits."""
    code = "import atexit, time; from mpipar.comm import survive; survive.PARTING = 1; "
    code += "atexit.register(time.sleep, 30); survive.end_in_time()"
    assert run([sys.executable, "-c", code], timeout=20).returncode == -signal.SIGALRM
