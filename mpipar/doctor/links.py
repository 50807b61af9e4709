"""Latency and bandwidth between every pair of nodes, and between two ranks of each node.

The first ranks of the nodes play a tournament (the circle method): in each round every node
measures with one other, and no node with two, so that p nodes take p - 1 rounds:

    4 nodes    round 0: 0-3 1-2     round 1: 1-3 2-0     round 2: 2-3 0-1

A pair is timed by messages to and fro.  Its latency is half of the fastest of the small ones, its
bandwidth comes from the fastest of the large ones.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from mpipar.doctor.finding import Check, Facts, Finding, Job, median
from mpipar.doctor.machine import Machine

TAG = 7
SMALL, SMALL_TIMES = 8, 60
LARGE, LARGE_TIMES = 1 << 22, 4
SECONDS = 0.25  # for the large messages of a pair
ROUNDS = 128  # at most: a few seconds
SLOW, VERY_SLOW = 0.5, 0.25  # of the median bandwidth
LATE = 4.0  # times the median latency


def probe(machine: Machine) -> Facts:
    """Measure; every rank takes part or sleeps."""
    local, world = machine.team.local, machine.world
    facts: Facts = {"inside": None, "between": []}
    if local.size > 1 and local.rank < 2:
        facts["inside"] = measure(local, 1 - local.rank)
    machine.meet()
    leaders = machine.job.leaders
    mine = leaders.index(world.rank) if machine.leads else None
    for pairs in tournament(len(leaders)):
        for a, b in pairs if mine is not None else ():
            if mine in (a, b):
                found = measure(world, leaders[a if mine == b else b])
                if mine == a:
                    facts["between"].append({"nodes": [a, b], **found})
    machine.meet()
    return facts


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs a < b in which each of `count` meets each other one once."""
    seats = list(range(count)) + [-1] * (count % 2)  # whoever meets -1 rests
    for _ in range(min(len(seats) - 1, ROUNDS) if count > 1 else 0):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0]
        seats[1:] = [seats[-1], *seats[1:-1]]


def measure(comm: MPI.Comm, peer: int) -> Facts:
    """Return latency (s) and bandwidth (bytes/s) to a peer that calls this too."""
    small = np.zeros(SMALL, np.uint8)
    latency = min(_there_and_back(comm, peer, small) for _ in range(SMALL_TIMES)) / 2
    large = np.zeros(LARGE, np.uint8)
    first = _there_and_back(comm, peer, large)  # warm; its time says how often to repeat
    times = np.array([max(1, min(LARGE_TIMES, int(SECONDS / first)))], np.int64)
    comm.Sendrecv(times.copy(), peer, TAG, *(others := np.empty_like(times),), peer, TAG)
    repeats = int(min(times[0], others[0]))
    fastest = min([first, *(_there_and_back(comm, peer, large) for _ in range(repeats))])
    return {"latency_s": latency, "bytes_per_s": 2 * LARGE / fastest}


def _there_and_back(comm: MPI.Comm, peer: int, data: np.ndarray) -> float:
    """Return the seconds of a message to and fro; the lower rank begins."""
    start = time.perf_counter()
    if comm.rank < peer:
        comm.Send([data, MPI.BYTE], peer, TAG)
        comm.Recv([data, MPI.BYTE], peer, TAG)
    else:
        comm.Recv([data, MPI.BYTE], peer, TAG)
        comm.Send([data, MPI.BYTE], peer, TAG)
    return time.perf_counter() - start


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Name the pair that is much slower than the others."""
    inside = [told[leader]["inside"] for leader in job.leaders]
    between = sorted((pair for one in told for pair in one["between"]), key=lambda p: p["nodes"])
    facts = {"inside": inside, "between": between}
    here = [one for one in inside if one]
    parts = []
    if here:
        parts.append(f"within a node {_speed(here)}")
    if between:
        parts.append(f"between nodes {_speed(between)}")
    if not parts:
        return Finding("links", "ok", "1 rank: nothing to measure", "", facts)
    words = "; ".join(parts)
    usual = median(pair["bytes_per_s"] for pair in between)
    late = LATE * median(pair["latency_s"] for pair in between)
    slowest = min(between, key=lambda pair: pair["bytes_per_s"], default=None)
    latest = max(between, key=lambda pair: pair["latency_s"], default=None)
    if slowest is None or latest is None or len(between) < 3:
        return Finding("links", "ok", words, "", facts)
    share = slowest["bytes_per_s"] / usual
    if share < SLOW:
        words += f"; {_pair(slowest, job)}: only {_speed([slowest])}"
        fix = "Look for a bad cable, or another interface: UCX_NET_DEVICES, FI_PROVIDER"
        bad = share < VERY_SLOW and not job.crowded
        return Finding("links", "problem" if bad else "note", words, fix, facts)
    if latest["latency_s"] > late:
        words += f"; {_pair(latest, job)}: latency {latest['latency_s'] * 1e6:.1f} us"
        fix = "Something else may use this link or these nodes"
        return Finding("links", "note", words, fix, facts)
    return Finding("links", "ok", words, "", facts)


def _speed(pairs: Sequence[Facts]) -> str:
    rate = median(pair["bytes_per_s"] for pair in pairs) / 1e9
    return f"{median(pair['latency_s'] for pair in pairs) * 1e6:.1f} us, {rate:.2f} GB/s"


def _pair(pair: Facts, job: Job) -> str:
    a, b = pair["nodes"]
    return f"{job.where(a)} to {job.where(b)}"


CHECK = Check("links", probe, judge)
