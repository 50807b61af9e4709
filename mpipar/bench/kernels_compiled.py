"""`mpipar bench kernels --compile-only`: what CUDA's assembler says of every kernel; no GPU needed.

A row for each version (number type) and architecture.  A stack or spills mean that values lie in
memory which should be in registers; the counts are instructions in the kernel's PTX:

    remarks    of the assembler: above all, that products of tiles wait for one another
    mma        products of tiles on tensor cores
    loads16    reads of 16 bytes
    copies16   asynchronous copies of 16 bytes to shared memory
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mpipar.errors import ConfigError, explain
from mpipar.kernels.device_cache import assembler, modules, told

TARGETS = ("80", "90")


@dataclass(frozen=True)
class Compiled:
    """A version of a kernel; sizes in bytes."""

    kernel: str
    target: str  # "80", "90", "90a"
    threads: int  # of a block, at most
    registers: int  # a thread
    shared: int  # a block, with what a kernel always takes of dynamic memory
    stack: int  # a thread
    spills: int
    remarks: int
    mma: int
    loads16: int
    copies16: int


def measure(
    targets: Sequence[str] = TARGETS, only: Sequence[str] = (), processes: int = 0
) -> tuple[list[Compiled], float]:
    """Compile all modules of kernels, or some; return the rows and the seconds that it took.

    What was compiled before is read from the cache.  processes: at once; 0: as many as cores.
    Raises ConfigError where the compiler is missing.
    """
    for there, needed in (
        (importlib.util.find_spec("numba_cuda"), "numba-cuda"),
        (assembler(), "ptxas"),
    ):
        if there is None:
            rule, fix = f"it needs {needed}", 'Install the extra: pip install ".[compile-cuda]"'
            raise ConfigError(explain("compile-only", True, rule, fix))
    start = time.perf_counter()
    with ThreadPoolExecutor(processes or len(os.sched_getaffinity(0))) as pool:
        tables = list(pool.map(lambda module: told(module, *targets), only or modules()))
    found = [Compiled(**row) for rows in tables for row in rows]
    return sorted(found, key=lambda row: (row.kernel, row.target)), time.perf_counter() - start
