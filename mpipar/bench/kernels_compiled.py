"""`mpipar bench kernels --compile-only`: what CUDA's assembler says of every kernel; no GPU needed.

A row for each version (number type) and architecture.  A stack or spills mean that values lie in
memory which should be in registers; the counts are instructions in the kernel's PTX:

    remarks    of the assembler: above all, that products of tiles wait for one another
    mma        products of tiles on tensor cores
    loads16    reads of 16 bytes
    copies16   asynchronous copies of 16 bytes to shared memory
"""

import importlib.util
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from mpipar.errors import ConfigError, explain
from mpipar.kernels.device_cache import modules

TARGETS = ("80", "90")
COUNTED = {
    "mma": r"mma\.sync|wgmma\.mma_async",
    "loads16": r"ld\.global(?:\.nc)?\.(?:v4\.[bfsu]32|v2\.[bfsu]64)",
    "copies16": r"cp\.async\.c[ag]\.shared\.global[^;]*, 16",
}


@dataclass(frozen=True)
class Compiled:
    """A version of a kernel; sizes in bytes."""

    kernel: str
    target: str  # "80", "90", "90a"
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

    processes: at once; 0: as many as cores.  Raises ConfigError where the compiler is missing.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        rule, fix = "it needs numba-cuda", 'Install the extra: pip install ".[compile-cuda]"'
        raise ConfigError(explain("compile-only", True, rule, fix))
    start = time.perf_counter()
    jobs = [(module, target) for module in only or modules() for target in targets]
    context = multiprocessing.get_context("spawn")
    count = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(count, len(jobs)), mp_context=context) as pool:
        found = [row for rows in pool.map(_compile, *zip(*jobs, strict=True)) for row in rows]
    return sorted(found, key=lambda row: (row.kernel, row.target)), time.perf_counter() - start


def _compile(module: str, target: str) -> list[Compiled]:
    """Compile one module for one architecture, in a process of its own."""
    from mpipar.kernels.device_build import assembler, versions

    if assembler() is None:
        rule, fix = "it needs ptxas", 'Install the extra: pip install ".[compile-cuda]"'
        raise ConfigError(explain("compile-only", True, rule, fix))
    return [
        Compiled(
            one.label, one.target, one.registers, one.shared, one.stack, one.spills,
            one.remarks,
            **{name: len(re.findall(pattern, one.ptx)) for name, pattern in COUNTED.items()},
        )
        for one in versions(module, target)
    ]  # fmt: skip
