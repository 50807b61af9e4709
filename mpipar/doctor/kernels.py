"""Do the kernels compile: Numba works, and what it compiles can be kept for the next run."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import mpipar.kernels
from mpipar.doctor.finding import Check, Facts, Finding, Job, median, who
from mpipar.doctor.machine import Machine


def probe(machine: Machine) -> Facts:
    """Compile a small loop, and look where the result would be kept."""
    start = time.perf_counter()
    error = _compile()
    return {
        "error": error,
        "seconds": round(time.perf_counter() - start, 3),
        "caches": [str(folder) for folder in caches() if _writable(folder)],
    }


def _compile() -> str:
    """Return "" if Numba compiles and runs a function, or what went wrong."""
    try:
        import numba

        @numba.njit
        def total(n: int) -> int:
            """Add up numbers."""
            amount = 0
            for i in range(n):
                amount += i
            return amount

        return "" if total(5) == 10 else "it computes wrong sums"
    except Exception as error:  # whatever LLVM or Numba raise is what is being looked for
        return f"{type(error).__name__}: {error}".splitlines()[0]


def caches() -> list[Path]:
    """Return the folders in which Numba tries to keep what it has compiled, first come first."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(next(iter(mpipar.kernels.__path__))) / "__pycache__"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    return [Path(named)] if named else [beside, home]


def _writable(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # which would be made
    return os.access(folder, os.W_OK | os.X_OK)


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say where kernels do not compile, or would be compiled again in each run."""
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    broken = [rank for rank, one in enumerate(told) if one["error"]]
    if broken:
        words = f"Numba does not compile ({who(broken)}): {told[broken[0]]['error']}"
        fix = "Install numba and llvmlite that fit this Python: pip install --upgrade numba"
        return Finding("kernels", "problem", words, fix, facts)
    words = f"compile, in {median(one['seconds'] for one in told):.1f} s"
    nowhere = [rank for rank, one in enumerate(told) if not one["caches"]]
    if nowhere:
        words += f"; nothing can be kept for the next run ({who(nowhere)})"
        fix = "Set NUMBA_CACHE_DIR to a folder that can be written"
        return Finding("kernels", "note", words, fix, facts)
    return Finding("kernels", "ok", f"{words}; kept in {told[0]['caches'][0]}", "", facts)


CHECK = Check("kernels", probe, judge)
