"""Freed memory is there for the next allocation without a page fault."""

import platform
import sys

import pytest

from tests.launch import run

CODE = """
import resource, numpy as np
from mpipar.train import heap
heap.keep_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    arrays = [np.ones(1 << 20, np.float32) for _ in range(4)]
use()
before = faults()
for _ in range(5):
    use()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not GNU's")
def test_what_is_freed_is_kept() -> None:
    done = run([sys.executable, "-c", CODE], timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # of 20,000 pages
