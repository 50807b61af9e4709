"""Is one rank slower than the others?  All multiply matrices at the same time.

In a synchronous step all wait for the slowest rank.  Usual causes: another job on its node, a
processor that is too hot, ranks bound to the same core.
"""

import time
from collections.abc import Sequence

import numpy as np

from mpipar.doctor.finding import Check, Facts, Finding, Job, median
from mpipar.doctor.machine import Machine
from mpipar.kernels.matmul.blas import product

N = 512
SECONDS = 0.4
SLOW, VERY_SLOW = 0.75, 0.5  # of the median


def probe(machine: Machine) -> Facts:
    """Multiply float32 matrices for a while; together, so that shared limits show."""
    a = np.full((N, N), 0.5, np.float32)
    out = product(a, a)  # (N, N), warm
    machine.meet()
    times: list[float] = []
    stop = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < stop or not times:
        product(a, a, out)
        times.append(time.perf_counter() - start)
    machine.meet()
    return {"gflops": 2 * N**3 * len(times) / sum(times) / 1e9}


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Compare every rank with the median."""
    rates = [one["gflops"] for one in told]
    usual, slowest = median(rates), min(range(len(rates)), key=rates.__getitem__)
    words = f"{usual:.0f} GFLOP/s a rank"
    if len(rates) > 1:
        words += f", the slowest {rates[slowest]:.0f} (rank {slowest})"
    facts = {"gflops": [round(rate, 1) for rate in rates]}
    share = rates[slowest] / usual
    if share >= SLOW:
        return Finding("speed", "ok", words, "", facts)
    words += f", {share:.0%} of the median, on {job.hosts[slowest]}"
    fix = "Look for another job on that node, its clock rate, and the cores of its ranks"
    bad = share < VERY_SLOW and not job.crowded
    return Finding("speed", "problem" if bad else "note", words, fix, facts)


CHECK = Check("speed", probe, judge)
