"""What doctor makes of facts: every judgement on invented machines."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mpipar.doctor import (
    clocks,
    cores,
    gpu,
    kernels,
    launcher,
    links,
    memory,
    mpi_library,
    speed,
    storage,
    threads,
)
from mpipar.doctor.finding import Finding, Job, listed, size, who, worst

Judge = Callable[[Sequence[dict[str, Any]], Job], Finding]

ONE = Job(("a",) * 4, (0, 0, 0, 0))
TWO = Job(("a", "a", "b", "b"), (0, 0, 1, 1))
FOUR = Job(("a", "b", "c", "d"), (0, 1, 2, 3))
CROWDED = Job(("a", "b", "c", "d"), (0, 1, 2, 3), crowded=True)

MPI = {"library": "MPICH 5", "standard": "5.0", "mpi4py": "4.1", "threads": "multiple"}
MPI |= {"largest_tag": 2**29, "large_counts": True}
START = {"rank": 0, "host": "a", "node": 0, "pid": 7, "launcher": "mpiexec of MPICH"}
START |= {"slots": 4, "mismatch": None}
BLAS = {"blas": "openblas", "version": "0.3", "kernels": "Zen", "threads": 1, "default": 4}
BLAS |= {"cores": 4}
SHARED = {"window": "", "free": 8 << 30, "total": 8 << 30, "stale": []}
LEFT = {"name": "mpich_shm_1_0", "bytes": 1 << 20, "age_s": 60, "owner": "me"}
GPU = {"cupy": True, "devices": 4, "mine": "H100 at 0", "driver": True, "aware": True}
GPU |= {"probe": "works", "error": ""}
NUMBA = {"error": "", "seconds": 1.0, "used": True, "numba": True, "cache": "/cache", "kept": True}
DISK = {"directory": ".", "error": "", "free": 1 << 40, "bytes_per_s": 1e9}


def bound(*groups: Sequence[int], there: int = 4, quota: float | None = None) -> list[Any]:
    return [{"cores": list(group), "there": there, "quota": quota} for group in groups]


def rates(*values: float) -> list[Any]:
    return [{"gflops": value} for value in values]


def offsets(*values: float) -> list[Any]:
    return [{"offsets": [(value, 1e-5) for value in values]}]


def pairs(*rates: float, late: float = 1e-6) -> list[Any]:
    """Facts of 4 nodes: the bandwidth of each pair, and the latency of the last."""
    nodes = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    between = [
        {"nodes": pair, "bytes_per_s": rate, "latency_s": 1e-6}
        for pair, rate in zip(nodes, rates, strict=True)
    ]
    between[-1]["latency_s"] = late
    return [{"inside": None, "between": between if rank == 0 else []} for rank in range(4)]


# judge, facts, job, verdict, what its words or its fix must say
CASES: list[tuple[Judge, list[Any], Job, str, list[str]]] = [
    (mpi_library.judge, [MPI] * 4, ONE, "ok", ["MPICH 5", "multiple", "536,870,912"]),
    (mpi_library.judge, [MPI | {"large_counts": False}] * 4, ONE, "ok", ["messages are cut"]),
    (mpi_library.judge, [MPI | {"threads": "single"}] * 4, ONE, "note", ["MPI_THREAD_MULTIPLE"]),
    (mpi_library.judge, [MPI | {"largest_tag": 32767}] * 4, ONE, "problem", ["tags up to"]),
    (mpi_library.judge, [MPI] * 3 + [MPI | {"library": "MPICH 4"}], ONE, "problem",
     ["rank 3: MPICH 4", "ranks 0-2: MPICH 5"]),
    (launcher.judge, [START] * 4, TWO, "ok", ["4 ranks", "node 1 (b): ranks 2-3"]),
    (launcher.judge, [START | {"mismatch": "SLURM_NTASKS=4, but 1 rank. Use --mpi=pmi2"}], ONE,
     "problem", ["SLURM_NTASKS=4", "Use --mpi=pmi2"]),
    (cores.judge, bound([0], [1], [2], [3]), ONE, "ok", ["rank 2: core 2"]),
    (cores.judge, bound(*[range(4)] * 4), ONE, "ok", ["ranks 0-3: cores 0-3"]),
    (cores.judge, bound(*[[0]] * 4), ONE, "problem", ["ranks 0-3 share core 0 of the 4", "srun"]),
    (cores.judge, bound([0, 1], [2, 3], [2], [3]), ONE, "problem", ["ranks 1-3", "cores 2-3"]),
    (cores.judge, bound(*[[0, 1]] * 4, there=2), ONE, "note", ["4 ranks on 2 cores"]),
    (cores.judge, bound(*[range(4)] * 4, quota=1.5), ONE, "note", ["4 ranks on 1.5 cores"]),
    (threads.judge, [BLAS] * 4, ONE, "ok", ["openblas 0.3 for Zen", "1 a rank"]),
    (threads.judge, [BLAS | {"threads": 4}] * 4, ONE, "problem", ["16 BLAS threads on the 4"]),
    (threads.judge, [BLAS | {"threads": 0}] * 4, ONE, "note", ["no BLAS"]),
    (threads.judge, [BLAS | {"kernels": "Prescott"}] * 4, ONE, "note", ["OPENBLAS_CORETYPE"]),
    (threads.judge, [BLAS | {"cores": 2}] * 4, ONE, "ok", ["1 a rank"]),  # not BLAS's fault
    (memory.judge, [SHARED] * 4, ONE, "ok", ["8.0 GiB of 8.0 GiB"]),
    (memory.judge, [SHARED | {"free": 1 << 26}] * 4, ONE, "note", ["--shm-size"]),
    (memory.judge, [SHARED | {"free": None}] * 4, ONE, "ok", ["no /dev/shm"]),
    (memory.judge, [SHARED | {"window": "broken"}] * 4, ONE, "problem", ["broken (rank 0)"]),
    (memory.judge, [SHARED | {"stale": [LEFT] * 3}] + [SHARED] * 3, ONE, "note",
     ["3 files of jobs that are dead, 3.0 MiB, of me on a", "rm /dev/shm/mpich_*"]),
    (memory.judge, [SHARED | {"stale": [LEFT], "free": 99}] + [SHARED] * 3, ONE, "problem", []),
    (gpu.judge, [GPU | {"devices": 0}] * 4, ONE, "ok", ["compute on CPUs"]),
    (gpu.judge, [GPU | {"devices": 0, "cupy": False}] * 4, ONE, "note", ["no CuPy", "cuda12"]),
    (gpu.judge, [GPU | {"mine": f"H100 at {i}"} for i in range(4)], ONE, "ok", ["CUDA-aware"]),
    (gpu.judge, [GPU | {"mine": str(i), "aware": False} for i in range(4)], ONE, "ok",
     ["not CUDA-aware", "through host memory"]),
    (gpu.judge, [GPU] * 4, ONE, "problem", ["share a GPU", "--gpus-per-task=1"]),
    (gpu.judge, [GPU | {"devices": 1}] * 4, ONE, "note", ["4 ranks share 1"]),
    (gpu.judge, [GPU] * 3 + [GPU | {"devices": 0}], ONE, "problem", ["rank 3 see no GPU"]),
    (gpu.judge, [GPU | {"error": "no driver"}] * 4, ONE, "note", ["no driver", "nvidia-smi"]),
    (gpu.judge, [GPU | {"probe": "arrives wrong"}] * 4, ONE, "problem", ["arrives wrong"]),
    (kernels.judge, [NUMBA] * 4, ONE, "ok", ["kept in /cache"]),
    (kernels.judge, [NUMBA, NUMBA | {"error": "no LLVM"}], ONE, "problem", ["rank 1", "no LLVM"]),
    (kernels.judge, [NUMBA | {"kept": False}] * 4, ONE, "note", ["XDG_CACHE_HOME"]),
    (kernels.judge, [NUMBA | {"used": False}] * 4, ONE, "note", ["MPIPAR_NUMBA"]),
    (kernels.judge, [NUMBA | {"used": False, "numba": False}] * 4, ONE, "note", ["pip install"]),
    (links.judge, pairs(*[1e9] * 6), FOUR, "ok", ["between nodes 1.0 us, 1.00 GB/s"]),
    (links.judge, pairs(*[1e9] * 5, 4e8), FOUR, "note", ["node 2 (c) to node 3 (d)", "0.40"]),
    (links.judge, pairs(*[1e9] * 5, 1e8), FOUR, "problem", ["node 2 (c) to node 3 (d)"]),
    (links.judge, pairs(*[1e9] * 5, 1e8), CROWDED, "note", ["node 2 (c) to node 3 (d)"]),
    (links.judge, pairs(*[1e9] * 6, late=1e-4), FOUR, "note", ["latency 100.0 us"]),
    (links.judge, [{"inside": None, "between": []}], Job(("a",), (0,)), "ok", ["1 rank"]),
    (clocks.judge, offsets(0), ONE, "ok", ["one clock"]),
    (clocks.judge, offsets(0, 1e-3), TWO, "ok", ["node 1 (b), +1.000 ms"]),
    (clocks.judge, offsets(0, -0.2), TWO, "note", ["-200.000 ms", "chrony"]),
    (clocks.judge, offsets(0, 1e-3, 60.0, 0), FOUR, "problem", ["Let c keep"]),
    (speed.judge, rates(100, 98, 101, 90), ONE, "ok", ["slowest 90 (rank 3)"]),
    (speed.judge, rates(100, 60, 100, 100), FOUR, "note", ["rank 1", "60% of the median, on b"]),
    (speed.judge, rates(100, 100, 20, 100), FOUR, "problem", ["rank 2", "on c"]),
    (speed.judge, rates(100, 100, 20, 100), CROWDED, "note", ["rank 2"]),
    (storage.judge, [DISK] * 4, ONE, "ok", ["1,000 MB/s", "1,024.0 GiB free"]),
    (storage.judge, [DISK | {"free": 1000}] * 4, ONE, "note", ["Make room"]),
    (storage.judge, [DISK, DISK, DISK | {"error": "not seen"}, DISK], TWO, "problem",
     ["not seen (rank 2 on b)", "--dir"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("judge", "told", "job", "verdict", "words"),
    CASES,
    ids=[f"{case[0].__module__.rpartition('.')[2]}-{i}" for i, case in enumerate(CASES)],
)
def test_judgement(judge: Judge, told: list[Any], job: Job, verdict: str, words: list[str]) -> None:
    finding = judge(told, job)
    assert finding.verdict == verdict, finding
    for word in words:
        assert word in f"{finding.words} -> {finding.fix}"
    assert verdict == "ok" or finding.fix  # a fix for whatever is not right
    assert "\n" not in finding.words


def test_every_pair_of_nodes_meets_once() -> None:
    for count in range(10):
        met: list[tuple[int, int]] = []
        for pairs in links.tournament(count):
            busy = [node for pair in pairs for node in pair]
            assert len(busy) == len(set(busy))
            met += pairs
        assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_the_worst_verdict() -> None:
    assert worst([]) == "ok"
    assert worst([Finding("a", "ok", ""), Finding("b", "note", "")]) == "note"
    assert worst([Finding("a", "problem", ""), Finding("b", "note", "")]) == "problem"


def test_how_ranks_and_sizes_are_written() -> None:
    assert listed([5, 1, 2, 3]) == "1-3, 5"
    assert (who([4]), who([0, 1])) == ("rank 4", "ranks 0-1")
    assert [size(n) for n in (10, 2048, 3 << 20, 5 << 30)] == [
        "10 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "no launcher"),
        ({"PMI_RANK": "0"}, "mpiexec of MPICH"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpiexec of Open MPI"),
        ({"SLURM_STEP_ID": "0", "PMI_RANK": "0"}, "srun"),
        ({"SLURM_STEP_ID": "0", "PMI_RANK": "0", "HYDI_CONTROL_FD": "7"}, "mpiexec of MPICH"),
    ],
)
def test_the_launcher(environ: dict[str, str], name: str) -> None:
    assert launcher.launcher(environ) == name
