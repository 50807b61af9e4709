"""How a collective call is timed: all ranks start together, the slowest rank counts.

Candidates are interleaved: A B C A B C A B C; of each one's medians the best is taken, so that a
machine that is slow for a while does not make one candidate look bad.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

Call = Callable[[], Any]


def interleaved(
    comm: MPI.Comm, candidates: dict[str, Call], nbytes: int, repeats: int = 3
) -> dict[str, float]:
    """Return the best of `repeats` medians of each candidate, in seconds, equal on all ranks."""
    best = dict.fromkeys(candidates, float("inf"))
    for call in candidates.values():  # plans, buffers and pages are warm
        call()
        call()
    for _ in range(repeats):
        for name, call in candidates.items():
            best[name] = min(best[name], median(comm, call, nbytes))
    return best


def median(comm: MPI.Comm, call: Call, nbytes: int) -> float:
    """Return the median seconds of a call; small calls are timed in batches."""
    batch, samples = _effort(nbytes)
    times = np.empty(samples)
    for sample in range(samples):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times[sample] = (time.perf_counter() - start) / batch
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(statistics.median(times))


def _effort(nbytes: int) -> tuple[int, int]:
    """Return calls in a batch, and batches: about 0.1 to 0.5 s for a candidate."""
    if nbytes <= 1 << 14:
        return 100, 15
    if nbytes <= 1 << 18:
        return 10, 15
    return 1, 15 if nbytes <= 1 << 22 else 7


def machine(comm: MPI.Comm) -> dict[str, Any]:
    """Describe the machine and the MPI library for a report."""
    from mpipar.comm import node

    vendor, version = MPI.get_vendor()
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": node.cores(),
        "ranks": comm.size,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return _first(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except OSError:
        return platform.processor()


def _first(items: Iterable[str]) -> str:
    return next(iter(items), platform.processor())
