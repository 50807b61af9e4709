"""How a rank waits: it spins briefly, then gives the core away, then sleeps; never for ever.

A wait polls `test`.  While it polls, every other operation that this thread has in flight advances
too, so that two handles may be waited for in opposite orders on two ranks.  Three spinning ranks
halve the speed of a working one on two cores, so a node with more ranks than cores hardly spins.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mpipar.comm import clock
from mpipar.trace import record as trace

SPINS = 2000  # polls before the first pause; about half a millisecond
OVERSUBSCRIBED_SPINS = 50
YIELD_SECONDS = 0.005  # then pauses are sleeps
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 1e-3  # in between, 2 % of the time waited so far
PATIENCE = 1.0  # for ranks that may never come
STUCK_SECONDS = 1.0  # then the watchdog looks for the cause, this often


class Watchdog(trace.Channel, Protocol):
    """What a wait asks when it takes long; a trace is told of it too."""

    running: Any  # the call on prepared requests that waits, or waited last

    def look(self, waited: float) -> None:
        """Raise if the cause is known, or if the time limit is over."""


_spins = SPINS


class _Thread(threading.local):
    """What this thread has in flight."""

    def __init__(self) -> None:
        self.in_flight: list[Callable[[], bool]] = []


_thread = _Thread()
_abandoned: list[Callable[[], bool]] = []


def set_oversubscribed(oversubscribed: bool) -> None:
    """Say whether this node has more ranks than cores."""
    global _spins
    _spins = OVERSUBSCRIBED_SPINS if oversubscribed else SPINS


def enter(test: Callable[[], bool]) -> None:
    """Let waits and `progress` of this thread advance this operation from now on.

    It is also kept alive until it is done: MPI writes to its memory whether anyone waits or not.
    """
    _thread.in_flight.append(test)


def leave(test: Callable[[], bool]) -> None:
    """Stop advancing this operation."""
    if test in _thread.in_flight:
        _thread.in_flight.remove(test)


def abandon() -> None:
    """Advance nothing of what is in flight any more, since ranks are gone.

    It stays alive: MPI may still write to its memory.
    """
    _abandoned.extend(_thread.in_flight)
    _thread.in_flight.clear()


def in_flight() -> tuple[Callable[[], bool], ...]:
    """Return the operations that this thread advances."""
    return tuple(_thread.in_flight)


def progress() -> None:
    """Advance every operation in flight in this thread; the pump of the autograd tape."""
    for test in tuple(_thread.in_flight):
        if test():
            leave(test)


def wait(test: Callable[[], object], watchdog: Watchdog) -> None:
    """Return when `test()` is true."""
    begun = clock.begin()
    _wait(test, watchdog)
    seconds = clock.end(begun)
    if trace.to is not None:
        trace.to.wait(watchdog, begun[0], seconds)


def wait_briefly(test: Callable[[], bool]) -> bool:
    """Return whether `test()` becomes true while it is worth waiting."""
    until = time.perf_counter() + PATIENCE
    while not (done := test()) and time.perf_counter() < until:
        progress()
        time.sleep(LONGEST_SLEEP)
    return done


def _wait(test: Callable[[], object], watchdog: Watchdog) -> None:
    for _ in range(_spins):
        if test():
            return
        if _thread.in_flight:
            progress()
    start = time.perf_counter()
    look_at = start + STUCK_SECONDS
    while not test():
        progress()
        now = time.perf_counter()
        if now - start < YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(max(0.02 * (now - start), SHORTEST_SLEEP), LONGEST_SLEEP))
        if now >= look_at:
            watchdog.look(now - start)
            look_at = now + STUCK_SECONDS / 4
