"""CUDA kernels on tiny shapes in Numba's simulator, each file of cases in a process of its own."""

import sys
from pathlib import Path

import pytest

from tests.launch import run

ROOT = Path(__file__).parents[2]
CASES = sorted(file.stem for file in (ROOT / "tests/cuda").glob("cases_*.py"))


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("cases", CASES)
def test_kernels_equal_their_references(cases: str) -> None:
    command = [sys.executable, "-m", "tests.cuda", cases]
    done = run(command, timeout=110, env={"NUMBA_ENABLE_CUDASIM": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
