"""A rank that fails ends the job, within seconds and by name.

When a rank dies of an exception while others wait for its message, MPI does not notice.  The first
Communicator therefore chains `sys.excepthook` and `threading.excepthook`: the traceback is printed
as usual, then one line that names the rank and its host, then MPI_Abort ends all ranks with exit
code 1.  Ctrl-C is one line, without a traceback.  MPIPAR_ABORT=0 opts out.

A launcher that hears of an abort may drop what it has not yet read from this rank's stderr, so the
abort waits until the pipe is empty.
"""

import fcntl
import os
import platform
import struct
import sys
import termios
import threading
import time
from types import TracebackType

from mpi4py import MPI

INTERRUPTED = 130  # the shell's exit code for Ctrl-C
DELIVERY = 2.0  # seconds at most for the launcher to read what this rank said
FORWARDING = 0.1  # seconds for the launcher to pass on what it has read
_installed = False


def install() -> None:
    """Chain the hooks, once for the process; nothing to do with one rank or MPIPAR_ABORT=0."""
    global _installed
    if _installed or MPI.COMM_WORLD.size == 1 or os.environ.get("MPIPAR_ABORT", "1") == "0":
        return
    _installed = True
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            previous(kind, error, trace)
        _abort(kind, error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        previous_thread(arguments)
        if arguments.exc_type is not SystemExit:
            _abort(arguments.exc_type, arguments.exc_value)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _abort(kind: type[BaseException], error: BaseException | None) -> None:
    if MPI.Is_finalized():
        return
    interrupted = issubclass(kind, KeyboardInterrupt)
    what = "was interrupted" if interrupted else "failed"
    why = "" if interrupted else f": {kind.__name__}: {error}"
    text = f"rank {MPI.COMM_WORLD.rank} on {platform.node()} {what} and ends the job{why}"
    end_job(f"mpipar: {text}", INTERRUPTED if interrupted else 1)


def end_job(text: str, code: int) -> None:
    """Print `text` on stderr, wait until the launcher has it, and abort all ranks with `code`."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    _deliver()
    MPI.COMM_WORLD.Abort(code)


def _deliver() -> None:
    """Wait until the other end has read what was written to stderr, if stderr is a pipe."""
    deadline = time.monotonic() + DELIVERY
    try:
        while _unread(sys.stderr.fileno()) and time.monotonic() < deadline:
            time.sleep(0.005)
    except (OSError, ValueError):  # no pipe, or no file at all: nothing is on its way
        return
    time.sleep(FORWARDING)


def _unread(file: int) -> int:
    """Return the number of bytes in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(file, termios.FIONREAD, b"\0" * 4))[0]
    return count
