"""A rank that fails ends the job, within seconds and by name.

When a rank dies of an exception while others wait for its message, MPI does not notice.  The first
Communicator therefore chains `sys.excepthook` and `threading.excepthook`: the traceback is printed
as usual, then one line that names the rank and its host, then MPI_Abort ends all ranks with exit
code 1.  What rank 0 and others fail of alike is printed once (alike.py).  Ctrl-C is one line,
without a traceback.  MPIPAR_ABORT=0 opts out.

A launcher that hears of an abort may drop what it has not yet read from this rank's stderr, so the
abort waits until the pipe is empty.

Where ranks may go on without others (survive.py) nobody hears of an abort, and the launcher takes
no notice of a rank that is killed: there a rank that fails kills itself, which the others see; but
if all fail, or this one because of others, the exit code says so.
"""

import fcntl
import os
import platform
import signal
import struct
import sys
import termios
import threading
import time
from types import TracebackType

from mpi4py import MPI

from mpipar.comm import alike, survive
from mpipar.errors import MpiparError

INTERRUPTED = 130  # the shell's exit code for Ctrl-C
DELIVERY = 2.0  # seconds at most for the launcher to read what this rank said
FORWARDING = 0.1  # seconds for the launcher to pass on what it has read
SILENCE = 5.0  # seconds for another rank to say what this one would, and end the job
_installed = False


def install() -> None:
    """Chain the hooks, once for the process; nothing to do with one rank or MPIPAR_ABORT=0."""
    global _installed
    if _installed or MPI.COMM_WORLD.size == 1 or os.environ.get("MPIPAR_ABORT", "1") == "0":
        return
    _installed = True
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ranks, by_code = [MPI.COMM_WORLD.rank], False
        if not issubclass(kind, KeyboardInterrupt):
            if not MPI.Is_finalized():
                ranks, by_code = alike.ranks_with(_words(kind, error))
            if ranks[0] != MPI.COMM_WORLD.rank:
                time.sleep(SILENCE)
                _die_if_others_go_on()
            previous(kind, error, trace)
        by_code |= survive.supported() and survive.tells(error, MPI.COMM_WORLD)
        _abort(kind, error, ranks, by_code)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        previous_thread(arguments)
        if arguments.exc_type is not SystemExit:
            _abort(arguments.exc_type, arguments.exc_value, [MPI.COMM_WORLD.rank], False)

    sys.excepthook, threading.excepthook = hook, thread_hook


def _abort(
    kind: type[BaseException], error: BaseException | None, ranks: list[int], by_code: bool
) -> None:
    if MPI.Is_finalized():
        return
    if issubclass(kind, KeyboardInterrupt):
        end_job(f"mpipar: {_who(ranks)} was interrupted and ends the job", INTERRUPTED)
    goes_on = survive.supported() and not by_code
    ends = ("leave" if goes_on else "end") + "s" * (len(ranks) == 1)
    text = f"mpipar: {_who(ranks)} failed and {ends} the job: {kind.__name__}: {error}"
    end_job(text, 1, by_code)


def _words(kind: type[BaseException], error: BaseException) -> str:
    """Return what is the same on ranks that fail alike: of our errors what comes before a colon.

    Behind it may stand what each rank has heard of the others.
    """
    text = str(error)
    return f"{kind.__name__}: {text.split(': ')[0] if isinstance(error, MpiparError) else text}"


def _who(ranks: list[int]) -> str:
    """Return "rank 2 on node1" or "ranks 0, 2, 3" or "all 4 ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {platform.node()}"
    size = MPI.COMM_WORLD.size
    return f"all {size} ranks" if len(ranks) == size else f"ranks {', '.join(map(str, ranks))}"


def end_job(text: str, code: int, by_code: bool = False) -> None:
    """Print `text` on stderr, wait until the launcher has it, and abort all ranks with `code`.

    Where the others may go on without it, this rank alone is ended, unless `by_code`: then all get
    an error in what they wait for.
    """
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    _deliver()
    if not by_code:
        _die_if_others_go_on()
    if survive.supported():
        survive.leave_all(MPI.COMM_WORLD)  # nobody waits for this rank any more
    MPI.COMM_WORLD.Abort(code)


def _die_if_others_go_on() -> None:
    """End this process by a signal, the one end that the others are told of there."""
    if survive.supported():
        os.kill(os.getpid(), signal.SIGKILL)


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
