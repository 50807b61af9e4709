"""The clock of communication: each moment once, however calls lie within each other."""

import threading
import time

import pytest

from mpipar.comm import clock


def call(seconds: float, *within: float) -> float:
    """Be in a call for a while, and in others within it; return the length of the outer one."""
    begun = clock.begin()
    for inner in within:
        call(inner)
    time.sleep(seconds)
    return clock.end(begun)


def test_a_call_within_another_counts_once() -> None:
    before, start = clock.seconds(), time.perf_counter()
    lengths = call(0.002, 0.003, 0.004) + call(0.001)
    assert clock.seconds() - before == pytest.approx(lengths, abs=1e-9)
    assert lengths <= time.perf_counter() - start


def test_what_raises_does_not_count() -> None:
    before = clock.seconds()
    begun = clock.begin()
    clock.begin()  # raised: it has no end
    time.sleep(0.002)
    length = clock.end(begun)
    assert clock.seconds() - before == pytest.approx(length, abs=1e-9)


def test_threads_have_their_own() -> None:
    before = clock.seconds()
    thread = threading.Thread(target=call, args=(0.001,))
    thread.start()
    thread.join()
    assert clock.seconds() == before
