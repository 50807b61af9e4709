"""A mistake is never a hang: real jobs in which one rank does something else."""

import os
import time

import pytest

from tests.launch import launch

START = """
import numpy as np, mpipar as mp, sys, time
from mpi4py import MPI
comm = mp.Communicator(MPI.COMM_WORLD, name="job", timeout={timeout})
r, p = comm.rank, comm.size
"""


def job(code: str, n: int = 3, timeout: float = 60.0) -> tuple[int, str, float]:
    """Return exit code, output and seconds of a job that must end by itself."""
    start = time.perf_counter()
    result = launch(n, ["-c", START.format(timeout=timeout) + code], timeout=90)
    return result.returncode, result.stdout + result.stderr, time.perf_counter() - start


MISMATCHES = {
    "count": "comm.all_reduce(np.ones(3 + (r == 2)))",
    "large count": "comm.all_reduce(np.ones(300_000 + (r == 2)))",
    "dtype": "comm.all_reduce(np.ones(4, 'f4' if r == 2 else 'f8'))",
    "operation": "comm.all_reduce(np.ones(3), op='max' if r == 2 else 'sum')",
    "order": "[comm.all_gather, comm.all_reduce][r == 2](np.ones(3))",
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_without_check_ends_the_job(name: str) -> None:
    code, output, seconds = job(MISMATCHES[name] + "\ncomm.barrier()\nprint('went on')")
    assert code != 0
    assert seconds < 30
    assert "end the job" in output  # all ranks, together
    assert "MismatchError" in output
    assert "#1" in output  # the sequence number


def test_one_rank_raises_while_the_others_wait() -> None:
    code, output, seconds = job(
        "if r == 1: raise RuntimeError('broken')\ncomm.all_reduce(np.ones(3))"
    )
    assert code != 0
    assert seconds < 30
    assert "rank 1 on" in output
    assert "RuntimeError: broken" in output


def test_an_error_of_several_ranks_is_printed_once() -> None:
    code, output, seconds = job("if r != 1: raise RuntimeError('broken')\ncomm.barrier()")
    assert code != 0
    assert seconds < 30
    assert "mpipar: ranks 0, 2 failed and end the job: RuntimeError: broken" in output
    assert output.count("Traceback") == 1


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_leaves_early_is_named(n: int) -> None:
    code, output, seconds = job("if r == 1: sys.exit(3)\ncomm.all_reduce(np.ones(3))", n)
    assert code != 0
    assert seconds < 30
    assert "rank 1 of communicator 'job' has ended its program" in output


DESTROYED = {  # code, and what is said
    "a collective inside a mesh": (
        "with mp.Mesh(MPI.COMM_WORLD) as mesh:\n    if r == 0: mesh.dp.all_reduce(np.ones(3))",
        "of communicator 'dp' destroys it after collective #0, and rank 0 waits in #1 all_reduce(",
    ),
    "saving inside a mesh": (
        "model = mp.nn.Linear(3, 3, name='a')\n"
        "with mp.Mesh(MPI.COMM_WORLD) as mesh:\n"
        "    if r == 0: mp.save('never', model, mesh)",
        "rank 0 has not come there: it waits in #1 all_gather(",
    ),
    "a collective after others": (
        "[comm.all_reduce(np.ones(3)) for _ in range(5)]\n"
        "if r != 2: comm.all_gather(np.ones(3))\ncomm.destroy()",
        "rank 2 of communicator 'job' destroys it after collective #5, and rank ",
    ),
    "another order": (
        "other = mp.Communicator(MPI.COMM_WORLD, name='other')\n"
        "[c.destroy() for c in ((comm, other) if r else (other, comm))]",
        "waits in #1 destroy() of communicator ",
    ),
    "one rank alone": (
        "if r == 1: comm.destroy()",
        "has ended its program after collective #0, and rank 1 waits in #1 destroy()",
    ),
}


@pytest.mark.parametrize("name", DESTROYED)
def test_destroying_while_others_do_something_else_is_named(name: str) -> None:
    code, output, seconds = job(DESTROYED[name][0], n=2 if "mesh" in name else 3)
    assert code != 0
    assert seconds < 30
    assert "MismatchError" in output
    assert DESTROYED[name][1] in output


def test_late_destroying_is_no_error() -> None:
    code, output, _ = job(
        "with mp.Mesh(MPI.COMM_WORLD) as mesh:\n"
        "    mesh.dp.all_reduce(np.ones(3)); mesh.world.all_reduce(np.ones(3), async_op=True)\n"
        "    if r == 1: time.sleep(2.5)\n"
        "comm.destroy(); comm.destroy()\n"
        "print('fine')"
    )
    assert code == 0, output
    assert output.count("fine") == 3


def test_destroying_after_an_error_does_not_wait() -> None:
    code, output, seconds = job(
        "try: comm.recv((2,), 'f8', src=0, async_op=True).wait() if r == 1 else (\n"
        "    comm.send(np.ones(3), 1, async_op=True) if r == 0 else None)\n"
        "except mp.errors.BufferMismatchError: print('caught')\n"
        "comm.destroy()\n"
        "print('fine')"
    )
    assert code == 0, output
    assert output.count("fine") == 3
    assert "caught" in output
    assert seconds < 20


def test_an_exception_in_a_thread_ends_the_job() -> None:
    code, output, seconds = job(
        "import threading\n"
        "def run(): raise RuntimeError('broken thread')\n"
        "if r == 1: threading.Thread(target=run).start()\n"
        "comm.all_reduce(np.ones(3)); comm.barrier(); time.sleep(20 if r == 1 else 0)\n"
        "comm.barrier()"
    )
    assert code != 0
    assert seconds < 18
    assert "broken thread" in output


def test_a_ring_of_blocking_sends_is_named() -> None:
    code, output, seconds = job("comm.send(np.ones(3)); comm.recv((3,), 'f8')")
    assert code != 0
    assert seconds < 30
    assert "ring of blocking sends" in output
    assert "shift" in output


def test_a_wait_past_the_time_limit_reports() -> None:
    code, output, seconds = job(
        "comm.all_reduce(np.ones(2))\nif r == 1: time.sleep(12)\ncomm.all_reduce(np.ones(300_000))",
        timeout=3.0,
    )
    assert code != 0
    assert seconds < 30
    assert "CollectiveTimeoutError" in output
    assert "all_reduce" in output
    assert "round" in output
    assert "the last 2 calls" in output
    assert "[1] are not waiting" in output


def test_a_slow_rank_is_no_error() -> None:
    code, output, _ = job(
        "for i in range(3):\n"
        "    if r == i: time.sleep(1.7)\n"
        "    assert comm.all_reduce(np.ones(3))[0] == p\n"
        "    comm.shift(np.ones(100_000)); comm.send(np.ones(3), async_op=True)\n"
        "    comm.recv((3,), 'f8')\n"
        "comm.barrier()\n"
        "comm.destroy()\n"
        "if r == 0: print('fine')"
    )
    assert code == 0, output
    assert "fine" in output


def test_the_hook_can_be_left_out() -> None:
    result = launch(
        1,
        ["-c", "import os; os.environ['MPIPAR_ABORT'] = '0'\n" + START.format(timeout=5) + "1/0"],
        timeout=30,
    )
    assert result.returncode != 0
    assert "ends the job" not in result.stderr


def test_the_first_communicator_shares_out_the_cores() -> None:
    code, output, _ = job(
        "import threadpoolctl\n"
        "info = threadpoolctl.threadpool_info()\n"
        "mine = [i['num_threads'] for i in info if i['user_api'] == 'blas']\n"
        "everyone = MPI.COMM_WORLD.gather(mine)\n"
        "if r == 0: print('threads', {n for ns in everyone for n in ns})",
        n=4,
    )
    assert code == 0
    expected = max(1, len(os.sched_getaffinity(0)) // 4)
    assert f"threads {{{expected}}}" in output
