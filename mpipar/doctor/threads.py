"""Threads against the cores of a node: those of BLAS; the compiled loops have one each.

The first Communicator gives each rank its share of the cores for BLAS, whatever the library chose
by itself; `default` is what it chose.
"""

from collections.abc import Sequence

from mpipar.doctor.cores import allotted
from mpipar.doctor.finding import Check, Facts, Finding, Job, who
from mpipar.doctor.machine import Machine
from mpipar.kernels.matmul.blas import mkl

# of OpenBLAS: kernels for any machine, several times slower than those for this one
SLOW = ("generic", "prescott", "core2", "armv8")


def probe(machine: Machine) -> Facts:
    """Ask the libraries."""
    import threadpoolctl

    mkl()  # is looked for when it is first needed
    blas = [info for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas"]
    blas.sort(key=lambda info: info["internal_api"] != "mkl")  # products are its work, if there
    first = blas[0] if blas else {}
    return {
        "blas": first.get("internal_api", "unknown"),
        "version": first.get("version"),
        "kernels": first.get("architecture"),
        "threads": max((info["num_threads"] for info in blas), default=0),
        "default": max(machine.default_threads.values(), default=0),
        "cores": allotted(),
    }


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Compare with the cores that the ranks of a node may use together."""
    first = told[0]
    kernels = f" for {first['kernels']}" if first["kernels"] else ""
    words = f"{first['blas']} {first['version'] or ''}".strip() + kernels
    words += f", {first['threads']} a rank ({first['default']} by itself); compiled loops 1"
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    unknown = [rank for rank, one in enumerate(told) if not one["threads"]]
    if unknown:
        fix = "Set its number of threads yourself, such that all ranks together fit the cores"
        words = f"no BLAS that threadpoolctl knows ({who(unknown)})"
        return Finding("threads", "note", words, fix, facts)
    for number, ranks in enumerate(job.nodes):
        together = sum(told[rank]["threads"] for rank in ranks)
        have = told[ranks[0]]["cores"]
        if together > max(have, len(ranks)):
            words = f"{together} BLAS threads on the {have} cores of {job.where(number)}"
            fix = "Leave MPIPAR_BLAS_THREADS unset, or set it to the cores a rank has"
            return Finding("threads", "problem", words, fix, facts)
    slow = [rank for rank, one in enumerate(told) if str(one["kernels"]).lower() in SLOW]
    if slow:
        fix = "Leave OPENBLAS_CORETYPE unset, or install a NumPy built for these processors"
        words = f"OpenBLAS uses its {told[slow[0]]['kernels']} kernels ({who(slow)})"
        return Finding("threads", "note", words, fix, facts)
    return Finding("threads", "ok", words, "", facts)


CHECK = Check("threads", probe, judge)
