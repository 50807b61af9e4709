"""`mpipar schedule verify`: prove many schedules, shared among processes.

For every algorithm and rank count, all of its kinds are proven: several roots, shift distances and
node layouts where it takes them, rank order where it promises it, and chunks cut in two.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpipar.cli.limits import plural
from mpipar.errors import ScheduleError
from mpipar.partition import blocks
from mpipar.schedule import count, cut, generators, make, verify

Task = tuple[str, str, int]  # collective, algorithm, ranks


@dataclass(frozen=True)
class Proof:
    """What was proven of one algorithm on one number of ranks, or the error that was found."""

    task: Task
    schedules: int
    messages: int
    seconds: float
    error: str = ""


def prove(chosen: list[tuple[str, str]], counts: list[int], jobs: int | None = None) -> int:
    """Prove all algorithms on all rank counts, print what was proven; return 0, or 1 if one fails.

    The schedules are shared among `jobs` processes, as many as there are cores if None.
    """
    start = time.perf_counter()
    tasks = [(collective, algorithm, p) for collective, algorithm in chosen for p in counts]
    proofs = list(_shown(_run(tasks, jobs), len(tasks)))
    _print_table(chosen, counts, proofs, time.perf_counter() - start)
    failed = [proof for proof in proofs if proof.error]
    for proof in failed:
        print(f"mpipar: error: {proof.error}", file=sys.stderr)
    return 1 if failed else 0


def kinds(collective: str, algorithm: str, p: int) -> Iterator[dict[str, Any]]:
    """Yield the options of `make` for each kind of schedule that is proven on `p` ranks."""
    takes = generators[collective][algorithm].options
    if "root" in takes:
        yield from ({"root": root} for root in sorted({0, p // 3, p // 2, p - 1}))
    elif "offset" in takes:
        yield from ({"offset": offset} for offset in sorted({1, -1, p // 2, p + 2}))
    elif "nodes" in takes:
        layouts = {blocks(p, nodes) for nodes in (1, 2, 3, p // 2, p) if 1 <= nodes <= p}
        uneven = (p - p // 3, p // 3) if p >= 3 else (p,)
        yield {}
        yield from ({"nodes": layout} for layout in sorted({*layouts, uneven}))
    else:
        yield {}


def prove_one(task: Task) -> Proof:
    """Prove all kinds of one algorithm on one number of ranks."""
    collective, algorithm, p = task
    start = time.perf_counter()
    ordered = generators[collective][algorithm].ordered
    schedules = messages = 0
    error = ""
    try:
        for options in kinds(collective, algorithm, p):
            schedule = make(collective, algorithm, p, **options)
            for parts in (1, 2) if schedules == 0 else (1,):
                verify(cut(schedule, parts), ordered=ordered)
                messages += parts * sum(count(schedule).messages)
                schedules += 1
    except ScheduleError as fault:
        error = str(fault)
    return Proof(task, schedules, messages, time.perf_counter() - start, error)


def _run(tasks: list[Task], jobs: int | None) -> Iterator[Proof]:
    work = sum(p * p for _, _, p in tasks)  # about 3 us for one unit
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        jobs = jobs or os.cpu_count() or 1
        jobs = jobs if work > 200_000 else 1
    if jobs <= 1:
        yield from map(prove_one, tasks)
        return
    from multiprocessing import get_context

    longest_first = sorted(tasks, key=lambda task: -task[2])
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(prove_one, longest_first, chunksize=4)


def _shown(proofs: Iterator[Proof], total: int) -> Iterator[Proof]:
    """Yield the proofs; where somebody watches, a bar shows how many there are."""
    if not sys.stderr.isatty():
        yield from proofs
        return
    from rich.console import Console
    from rich.progress import track

    bar: dict[str, Any] = {"description": "proving", "transient": True}
    yield from track(proofs, total=total, console=Console(stderr=True), **bar)


def _print_table(
    chosen: list[tuple[str, str]], counts: list[int], proofs: list[Proof], seconds: float
) -> None:
    print(f"{'':32}{'schedules':>11}{'messages':>14}{'seconds':>10}")
    for collective, algorithm in chosen:
        of = [proof for proof in proofs if proof.task[:2] == (collective, algorithm)]
        wrong = [proof.task[2] for proof in of if proof.error]
        verdict = f"  WRONG on {plural(min(wrong), 'rank')}" if wrong else ""
        print(f"{f'{collective}/{algorithm}':32}{_totals(of)}{verdict}")
    ranks = f"{plural(len(counts), 'rank count')} up to {max(counts)}"
    verdict = "not all are right" if any(proof.error for proof in proofs) else "all proven"
    print(f"{'all':32}{_totals(proofs)}")
    print(f"{ranks}: {verdict}, {seconds:.1f} s by the clock")


def _totals(proofs: list[Proof]) -> str:
    schedules = sum(proof.schedules for proof in proofs)
    messages = sum(proof.messages for proof in proofs)
    seconds = sum(proof.seconds for proof in proofs)
    return f"{schedules:>11,}{messages:>14,}{seconds:>10.1f}"
