"""How long a thread has been inside communication calls: each moment once.

Calls lie within each other: a wait for one communicator advances what is in flight on another,
whose last step may begin a third call.  Every communicator counts the seconds of its own calls; the
clock of the thread counts the outermost only, without knowing which that is:

    outer call   begin ├────────────────────────────┤ end: clock = what it was at begin + length
    inner call            begin ├──────┤ end

An inner call has moved the clock on too; the end of the outer one puts that right.  A call that
raises counts as if it had not been.
"""

import threading
import time

Begun = tuple[float, float]  # when a call began, and what the clock showed then


class _Clock(threading.local):
    seconds = 0.0


_clock = _Clock()


def begin() -> Begun:
    """Begin a call."""
    return time.perf_counter(), _clock.seconds


def end(begun: Begun) -> float:
    """End a call; return its seconds."""
    elapsed = time.perf_counter() - begun[0]
    _clock.seconds = begun[1] + elapsed
    return elapsed


def seconds() -> float:
    """Return how long this thread has been inside communication calls so far."""
    return _clock.seconds
