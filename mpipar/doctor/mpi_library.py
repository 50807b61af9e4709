"""The MPI library: which one, its threads, its tags and its counts.

mpipar needs tags up to LARGEST_TAG (comm/group.py); the standard grants 32,767 only.  Messages of
more than 2 GiB are cut in pieces by mpipar, so that large counts are a convenience.
"""

from collections.abc import Sequence

import mpi4py
from mpi4py import MPI

from mpipar.comm.group import LARGEST_TAG
from mpipar.doctor.finding import Check, Facts, Finding, Job, Verdict, ranks_of, who
from mpipar.doctor.machine import Machine

LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
BEYOND = 2**31 + 16  # elements


def probe(machine: Machine) -> Facts:
    """Ask the library."""
    vendor, version = MPI.get_vendor()
    return {
        "library": f"{vendor} {'.'.join(map(str, version))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": mpi4py.__version__,
        "threads": LEVELS[MPI.Query_thread()],
        "largest_tag": machine.world.Get_attr(MPI.TAG_UB),
        "large_counts": _large_counts(),
    }


def _large_counts() -> bool:
    """Say whether the library describes more than 2^31 elements; no memory is touched."""
    try:
        many = MPI.BYTE.Create_contiguous(BEYOND).Commit()
    except (RuntimeError, OverflowError):  # MPI.Exception is one, and so is mpi4py's refusal
        return False
    right: bool = many.Get_size() == BEYOND
    many.Free()
    return right


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say what mpipar lacks in this library."""
    first = told[0]
    for key in ("library", "mpi4py"):
        if len(groups := ranks_of(told, key)) > 1:
            words = "; ".join(f"{who(ranks)}: {value}" for value, ranks in groups.items())
            fix = "Give all nodes the same environment, for example on a shared file system"
            return Finding("MPI", "problem", f"the ranks have different {key}: {words}", fix, first)
    counts = "yes" if first["large_counts"] else "no, messages are cut"
    words = (
        f"{first['library']}, MPI {first['standard']}, mpi4py {first['mpi4py']}; threads: "
        f"{first['threads']}; largest tag {first['largest_tag']:,}; large counts: {counts}"
    )
    verdict: Verdict = "ok"
    fix = ""
    if first["threads"] != "multiple":
        verdict = "note"
        fix = (
            "Threads must not use MPI at the same time with this library; build it with "
            "MPI_THREAD_MULTIPLE, or leave mpi4py.rc.thread_level alone"
        )
    if min(facts["largest_tag"] for facts in told) < LARGEST_TAG:
        verdict = "problem"
        fix = f"mpipar needs tags up to {LARGEST_TAG:,}: use MPICH or Open MPI from PyPI"
    return Finding("MPI", verdict, words, fix, first)


CHECK = Check("MPI", probe, judge)
