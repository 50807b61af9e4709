"""Are the kernels compiled: Numba works, and the machine code can be kept for the next run.

The first process of a machine compiles all loops in another process, for about ten seconds; the
others, and later runs, load the file (kernels/native.py).
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path

from mpipar.doctor.finding import Check, Facts, Finding, Job, who
from mpipar.doctor.machine import Machine, rest
from mpipar.errors import ConfigError
from mpipar.kernels import native


def probe(machine: Machine) -> Facts:
    """Compile or load the loops: the node's first rank, and then the others."""
    local = machine.team.local
    if not machine.leads:
        rest(local.Ibarrier())
    start = time.perf_counter()
    error, used = "", False
    try:
        used = native.compile_cpu()
    except (ConfigError, OSError) as wrong:
        error = " ".join(str(wrong).split())[-300:]
    seconds = round(time.perf_counter() - start, 3)
    if machine.leads:
        rest(local.Ibarrier())
    return {"error": error, "used": used, "seconds": seconds} | {
        "numba": importlib.util.find_spec("numba") is not None,
        "cache": str(cache()),
        "kept": _writable(cache()),
    }


def cache() -> Path:
    """Return the folder in which the machine code is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpipar"


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # which would be made
    return os.access(folder, os.W_OK | os.X_OK)


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say where kernels do not compile, or would be compiled again in each run."""
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    broken = [rank for rank, one in enumerate(told) if one["error"]]
    if broken:
        words = f"the loops do not compile ({who(broken)}): {told[broken[0]]['error']}"
        fix = "Install a numba that fits this Python; MPIPAR_NUMBA=0 does without"
        return Finding("kernels", "problem", words, fix, facts)
    absent = [rank for rank, one in enumerate(told) if not one["numba"]]
    if absent:
        words = f"Numba is not installed ({who(absent)}): NumPy does its work, more slowly"
        return Finding("kernels", "note", words, "pip install numba", facts)
    unused = [rank for rank, one in enumerate(told) if not one["used"]]
    if unused:
        words = f"compiled loops are switched off ({who(unused)}): NumPy does their work"
        return Finding("kernels", "note", words, "Leave MPIPAR_NUMBA unset", facts)
    words = f"compiled or loaded in {max(one['seconds'] for one in told):.1f} s"
    nowhere = [rank for rank, one in enumerate(told) if not one["kept"]]
    if nowhere:
        words += f"; nothing can be kept for the next run ({who(nowhere)})"
        fix = "Set XDG_CACHE_HOME to a folder that can be written"
        return Finding("kernels", "note", words, fix, facts)
    return Finding("kernels", "ok", f"{words}; kept in {told[0]['cache']}", "", facts)


CHECK = Check("kernels", probe, judge)
