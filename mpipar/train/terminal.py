"""Is a person watching?  Asked of the launcher, because ranks write to it, not to the terminal.

MPICH's mpiexec gives each rank a pipe even when it was started in a terminal; Open MPI's gives a
pseudo-terminal even when its own output goes to a file.  Only the launcher's own standard output
says who reads in the end, and on Linux /proc shows it:

    terminal <- mpiexec <- hydra_pmi_proxy <- python (a pipe)          a bar that redraws itself
    file     <- prterun <- python (a pseudo-terminal)                  plain lines
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

LAUNCHERS = ("mpiexec", "mpirun", "mpiexec.hydra", "prterun", "prun", "orterun")


def width() -> int | None:
    """Return the columns of the terminal that shows this job's output, or None if none does."""
    output = launcher_output()
    if output is None:
        return _columns(sys.stdout.fileno()) if sys.stdout.isatty() else None
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _columns(descriptor) if os.isatty(descriptor) else None
    finally:
        os.close(descriptor)


def launcher_output() -> str | None:
    """Return what the launcher's standard output is open on, or None if no launcher is found."""
    for process in ancestors():
        if (process / "comm").read_text().strip() in LAUNCHERS:
            try:
                return os.readlink(process / "fd" / "1")
            except OSError:  # the process of another user
                return None
    return None


def ancestors() -> Iterator[Path]:
    """Yield /proc/PID of this process's parent, its parent, and so on; nothing without /proc."""
    process = Path("/proc", str(os.getppid()))
    while (process / "stat").exists():
        yield process
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        process = Path("/proc", fields[1])


def _columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or 80
    except OSError:
        return 80
