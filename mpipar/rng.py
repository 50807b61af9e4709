"""Counter-based random numbers: a value depends on (seed, name, global element index) only.

A rank that holds a shard draws exactly the numbers that the whole array would have there, so the
layout of the mesh never changes the initial weights or the dropout masks.  The generator is
SplitMix64 used in counter mode (Steele, Lea, Flood, OOPSLA 2014): state = key + index * golden,
then the finalising mix.

Dropout also depends on the training step and on the global row (sequence) of the batch; the
training loop states these with `at`.  Outside of it each call of dropout is counted instead, so
that the next one drops other elements; `recompute` takes the counter back with `back_at`.  Position
and counter belong to a thread.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def key(seed: int, *names: object) -> int:
    """Return a 64-bit key for `seed` and any names, equal on every machine and Python."""
    text = "\x1f".join([str(int(seed)), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bits(key: int, index: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each uint64 element of `index`."""
    z = index.astype(np.uint64) * GOLDEN
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= FIRST
    z ^= z >> np.uint64(27)
    z *= SECOND
    z ^= z >> np.uint64(31)
    return z


def indices(global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return the row-major global element index of every element of a local block."""
    total = np.zeros((), np.uint64)
    stride = 1
    for axis in reversed(range(len(global_shape))):
        steps = np.arange(shape[axis], dtype=np.uint64) + np.uint64(offset[axis])
        total = total + (steps * np.uint64(stride)).reshape(
            (-1,) + (1,) * (len(global_shape) - 1 - axis)
        )
        stride *= global_shape[axis]
    return np.broadcast_to(total, tuple(shape))


def uniform(key: int, index: np.ndarray) -> np.ndarray:
    """Return float64 numbers in [0, 1), one for each index."""
    return (bits(key, index) >> np.uint64(11)) * 2.0**-53


def normal(key: int, index: np.ndarray) -> np.ndarray:
    """Return float64 standard normal numbers, one for each index (Box-Muller)."""
    pair = index.astype(np.uint64) * np.uint64(2)
    radius = np.sqrt(-2.0 * np.log1p(-uniform(key, pair)))
    return radius * np.cos(2.0 * np.pi * uniform(key, pair + np.uint64(1)))


@dataclass(frozen=True)
class Position:
    """Where in training the computation stands: the step, and the global row of local row 0."""

    step: int = 0
    row: int = 0


@dataclass(frozen=True)
class Place:
    """All that draws depend on besides seed, name and index: what `place` gives to `back_at`."""

    position: Position | None  # None outside `at`
    calls: int


class _Now(threading.local):
    """Where this thread stands."""

    position: Position | None = None
    calls: int = 0  # of `moment` outside `at`


_now = _Now()


def position() -> Position:
    """Return the current position, as set by `at`; step 0 and row 0 outside of it."""
    return _now.position or Position()


def moment() -> tuple[object, ...]:
    """Return names that tell this call's draws from another call's, for `key`.

    Inside `at` it is the step; outside it is a new number, one more at every call.
    """
    if _now.position is not None:
        return (_now.position.step,)
    _now.calls += 1
    return ("call", _now.calls)


@contextlib.contextmanager
def at(step: int, row: int) -> Iterator[None]:
    """Set the position for the operations in the block; the old one comes back afterwards.

    step: of training.  row: the global row of the batch that this process's first row is.
    """
    with back_at(Place(Position(step, row), _now.calls)):
        yield


def place() -> Place:
    """Return the position and the number of calls counted, to come back to."""
    return Place(_now.position, _now.calls)


@contextlib.contextmanager
def back_at(there: Place) -> Iterator[None]:
    """Draw in the block what was drawn after `there` was taken; then go on as before."""
    before = place()
    _now.position, _now.calls = there.position, there.calls
    try:
        yield
    finally:
        _now.position, _now.calls = before.position, before.calls
