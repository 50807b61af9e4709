"""Where the wgmma product keeps its slices, and what its descriptors say of them; no simulator."""

import itertools

import numpy as np
import pytest

from mpipar.kernels.matmul.wgmma import BLOCK, PIECE, STEP, TALL, descriptor, further, pays, place
from mpipar.kernels.wgmma_model import DEPTH, ORIGIN, Memory, addresses, spread

LAYOUTS = list(itertools.product((TALL, 64, 256), (False, True)))  # elements of m or n; across k


def stored(count: int, across: bool) -> np.ndarray:
    """Return a slice whose element (i, k) is 64 i + k, as copies leave it."""
    wanted = np.arange(count * STEP, dtype=np.uint16).reshape(count, STEP)
    found = np.zeros(count * STEP, np.uint16)
    rows = wanted.T if across else wanted
    for row, piece in np.ndindex(rows.shape[0], rows.shape[1] // PIECE):
        at = place(row, piece)
        found[at : at + PIECE] = rows[row, PIECE * piece : PIECE * (piece + 1)]
    return found


@pytest.mark.parametrize(("count", "across"), LAYOUTS)
def test_descriptors_find_every_element(count: int, across: bool) -> None:
    memory = Memory()
    start = memory.place(stored(count, across), 0)
    for first in range(0, count, 64) if count == TALL else (0,):  # A: of each warpgroup
        many = 64 if count == TALL else count
        for k in range(0, STEP, DEPTH):
            one = descriptor(start + first // 64 * 2 * BLOCK, across)
            where = addresses(one + k // DEPTH * further(across), many, across)
            wanted = (first + np.arange(many)[:, None]) * STEP + k + np.arange(DEPTH)
            np.testing.assert_array_equal(memory.read(where, "uint16"), wanted)


@pytest.mark.parametrize(("count", "across"), LAYOUTS)
def test_copies_fill_a_slice_without_conflicts(count: int, across: bool) -> None:
    rows, pieces = (STEP, count // PIECE) if across else (count, STEP // PIECE)
    places = [place(row, piece) for row in range(rows) for piece in range(pieces)]
    assert sorted(places) == list(range(0, count * STEP, PIECE))
    for first in range(0, len(places), 8):  # threads that write together: each of the 8 x 4 banks
        assert {at // PIECE % 8 for at in places[first : first + 8]} == set(range(8))


@pytest.mark.parametrize("across", [False, True])
def test_the_model_is_the_canonical_layout(across: bool) -> None:
    """In units of 16 bytes ((8, m), 2): ((8, stride), 1), or ((8, m), (8, 2)): ((1, leading),
    (8, stride)), whose bits 0..2 are then exchanged by bits 3..5.
    """
    leading, stride, count = 4096, 64, 128
    one = 1 << 62 | stride << 32 | leading << 16 | ORIGIN // 16
    found = addresses(one, count, across)
    for i, k in itertools.product(range(count), range(16)):
        if across:
            unit, inside = i // 8 % 8 + i // 64 * leading + k % 8 * 8 + k // 8 * stride, i % 8
        else:
            unit, inside = i % 8 * 8 + i // 8 * stride + k // 8, k % 8
        unit += ORIGIN // 16
        assert found[i, k] == 16 * (unit ^ (unit // 8 % 8)) + 2 * inside


def test_sums_are_where_the_threads_write_them() -> None:
    held = spread(np.arange(64 * 32).reshape(64, 32))
    for thread, n in np.ndindex(128, 16):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (n // 2 % 2)
        assert held[thread, n] == 32 * row + 8 * (n // 4) + 2 * (thread % 4) + n % 2


@pytest.mark.parametrize(
    ("batch", "m", "n", "found"),
    [(1, 4096, 4096, True), (1, 512, 512, False), (64, 64, 256, True), (64, 32, 256, False)],
)
def test_when_it_pays(batch: int, m: int, n: int, found: bool) -> None:
    """Tiles for half of the multiprocessors, at least half full."""
    assert pays(2 * batch, m, n) is found
