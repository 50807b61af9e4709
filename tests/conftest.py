"""The whole suite: `mpiexec -n 4 pytest` runs it on four ranks, `pytest` on one.

- tests/unit: one process
- tests/mpi: any number of ranks, all at once
- tests/hosts: jobs on two emulated hosts with a slow link; takes root and Debian's iproute2
- tests/slurm: the batch scripts, on a Slurm of two nodes; takes root and Debian's slurm packages
- tests/repo: the repository itself: layers, packaging, the README
"""

import os
import tempfile
from pathlib import Path

import hypothesis

from tests.ranks.plugin import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")

# jobs and tests that fail on purpose leave their reports here, not in the current folder
os.environ.setdefault("MPIPAR_REPORT_DIR", str(Path(tempfile.gettempdir(), "mpipar-test-reports")))
