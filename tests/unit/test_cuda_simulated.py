"""CUDA kernels on tiny shapes in Numba's simulator, each file of cases in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = sorted(file.stem for file in (ROOT / "tests/cuda").glob("cases_*.py"))


@pytest.mark.parametrize("cases", CASES)
def test_kernels_equal_their_references(cases: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda", cases, "numpy", "tiny"],
        cwd=ROOT, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
