"""The test suite's own machinery: small suites under mpiexec in which ranks fail, hang or leave."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import clean_environment, clean_environment_of, launch

FAILING = """
def test_before():
    pass

def test_one_rank_fails():
    print("a word from rank", W.rank)
    assert W.rank != 1, f"wrong on {W.rank}"

def test_all_fail():
    raise KeyError("the same everywhere")

def test_after():
    W.Barrier()
"""

RAISING = """
def test_wait_for_rank_1():
    if W.rank == 1:
        raise ValueError("rank 1 has had enough")
    W.Recv(bytearray(1), source=1)
"""

HANGING = """
@pytest.mark.time_limit(2)
def test_wait_for_ever():
    if W.rank == 0:
        time.sleep(60)
    W.Barrier()
"""

LEAVING = """
def test_leave():
    if W.rank == 1:
        pytest.exit("rank 1 leaves")

def test_more():
    pass
"""

DIFFERENT = """
@pytest.mark.parametrize("i", range(W.rank + 1))
def test_more_on_some_ranks(i):
    pass
"""

SKIPPING = """
def test_skipped_on_all():
    pytest.skip("not now")

def test_only_on_some():
    if W.rank == 1:
        pytest.skip("rank 1 has nothing to do")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected():
    assert W.rank == 7
"""

ALONE = """
@pytest.mark.parametrize("i", range(7))
def test_alone(i):
    assert i != 5
    assert not [name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_COMM_"))]
"""

TOGETHER = """
@pytest.mark.mpi
def test_all():
    MPI.COMM_WORLD.Barrier()
"""

TEARDOWN = """
@pytest.fixture
def broken():
    yield
    assert W.rank != 2, "left behind"

def test_teardown(broken):
    pass
"""

HEAD = """
import os, time
import pytest
from mpi4py import MPI
W = MPI.COMM_WORLD
{mark}
"""


def suite(
    folder: Path, body: str, ranks: int = 3, alone: bool = False, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a test file of its own with pytest on some ranks."""
    head = HEAD.format(mark="" if alone else "pytestmark = pytest.mark.mpi")
    (folder / "test_it.py").write_text(head + body)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --with-mpi -p no:cacheprovider\n")
    args = ["-m", "pytest", "--color=no", "-p", "tests.ranks.plugin", "-rA", "--grace=2", *options]
    return launch(ranks, [*args, "test_it.py"], timeout=60, cwd=folder)


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return the numbers of pytest's closing line."""
    closing = re.findall(r"^=+ (.* in [\d.]+s).* =+$", done.stdout, re.M)
    assert len(closing) == 1, "rank 0 alone closes:\n" + done.stdout + done.stderr
    return {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", closing[0].split(" in ")[0])}


def test_a_failure_on_one_rank_is_one_of_all(tmp_path: Path) -> None:
    done = suite(tmp_path, FAILING)
    assert done.returncode == 1
    assert counts(done) == {"passed": 2, "failed": 2}
    assert "failed on rank 1 -" in done.stdout
    assert "wrong on 1" in done.stdout
    assert "a word from rank 1" in done.stdout  # what the failing rank had printed
    assert "a word from rank 0" not in done.stdout
    assert done.stdout.count("- failed on ranks 0, 1, 2 -") == 1  # one text for the three


def test_a_rank_that_raises_while_others_wait(tmp_path: Path) -> None:
    start = time.monotonic()
    done = suite(tmp_path, RAISING)
    assert time.monotonic() - start < 30
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "rank 1 of 3: test_it.py::test_wait_for_rank_1 failed here" in said
    assert "rank 1 has had enough" in said
    assert "stacks of rank 0" in said
    assert "in test_wait_for_rank_1" in said


def test_a_hang_is_ended_and_located(tmp_path: Path) -> None:
    start = time.monotonic()
    done = suite(tmp_path, HANGING)
    assert time.monotonic() - start < 30
    assert done.returncode != 0
    said = done.stdout + done.stderr
    ended = r"rank (\d) of 3: test_it.py::test_wait_for_ever took longer than its limit of 2 s"
    assert len(re.findall(ended, said)) == 1  # one rank speaks for all
    for rank in range(3):
        assert f"stacks of rank {rank}" in said


def test_a_hang_in_one_process(tmp_path: Path) -> None:
    done = suite(tmp_path, HANGING, ranks=1)
    assert done.returncode != 0
    assert "rank 0 of 1: test_it.py::test_wait_for_ever took longer" in done.stdout + done.stderr


def test_a_rank_that_leaves_early(tmp_path: Path) -> None:
    done = suite(tmp_path, LEAVING)
    assert done.returncode != 0
    assert "rank 1 stopped early" in done.stdout


def test_ranks_that_collect_different_tests(tmp_path: Path) -> None:
    done = suite(tmp_path, DIFFERENT)
    assert done.returncode != 0
    assert "the ranks collected different tests" in done.stdout + done.stderr


def test_skips_and_expected_failures(tmp_path: Path) -> None:
    done = suite(tmp_path, SKIPPING)
    assert done.returncode == 0
    assert counts(done) == {"passed": 1, "skipped": 1, "xfailed": 1}


@pytest.mark.parametrize("ranks", [1, 4])
def test_tests_for_one_process_are_shared_out(tmp_path: Path, ranks: int) -> None:
    done = suite(tmp_path, ALONE, ranks, alone=True)
    assert done.returncode == 1
    assert counts(done) == {"passed": 6, "failed": 1}
    assert "test_alone[5]" in done.stdout
    assert "assert 5 != 5" in done.stdout


def test_more_ranks_than_tests(tmp_path: Path) -> None:
    done = suite(tmp_path, ALONE, 4, alone=True, options=("-k", "test_alone[3]"))
    assert done.returncode == 0
    assert counts(done)["passed"] == 1


def test_no_test_at_all_is_said(tmp_path: Path) -> None:
    assert suite(tmp_path, ALONE, 2, alone=True, options=("-k", "nothing")).returncode == 5


def test_stopping_at_the_first_failure(tmp_path: Path) -> None:
    done = suite(tmp_path, ALONE + TOGETHER, 2, alone=True, options=("-x",))
    assert done.returncode != 0
    assert counts(done)["failed"] == 1
    assert "took longer" not in done.stdout + done.stderr


def test_a_failure_in_teardown(tmp_path: Path) -> None:
    done = suite(tmp_path, TEARDOWN)
    assert done.returncode == 1
    assert "left behind" in done.stdout
    assert "rank 2 in teardown" in done.stdout


def test_synchronous_sends_are_asked_for(tmp_path: Path) -> None:
    body = """
def test_run_knows():
    from mpipar.comm import run
    assert run.synchronous_sends
"""
    assert suite(tmp_path, body, 2, options=("--synchronous-sends",)).returncode == 0


def test_launch_kills_what_takes_too_long(tmp_path: Path) -> None:
    code = "import time; print('started', flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        launch(2, ["-c", code], timeout=4)
    assert time.monotonic() - start < 20
    assert caught.value.stdout.count("started") == 2


def test_what_a_launcher_sets_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_MCA_btl", "self")
    clean = clean_environment()
    assert "PMI_RANK" not in clean
    assert "OMPI_COMM_WORLD_SIZE" not in clean
    assert clean["OMPI_MCA_btl"] == "self"
    with clean_environment_of(os.environ):
        assert "PMI_RANK" not in os.environ
    assert os.environ["PMI_RANK"] == "3"
