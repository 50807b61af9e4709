"""Where the tensor-core product keeps its slices: no two pieces of one access meet in a bank."""

import pytest

from mpipar.kernels.matmul.mma import PIECE, SLICE, STEP, TILE, place

BANKS, BYTES = 32, 4


def banks(first: int) -> set[int]:
    """Return the banks of a piece that begins at this 16-bit element."""
    return {(2 * first // BYTES + n) % BANKS for n in range(2 * PIECE // BYTES)}


def assert_apart(pieces: list[int]) -> None:
    """16-byte accesses go 8 threads at a time: together they need every bank once."""
    assert len(pieces) == 8
    assert set().union(*map(banks, pieces)) == set(range(BANKS))


@pytest.mark.parametrize("across", [False, True])
def test_pieces_fill_a_slice(across: bool) -> None:
    rows, pieces = (STEP, TILE // PIECE) if across else (TILE, STEP // PIECE)
    found = {place(row, piece, across) for row in range(rows) for piece in range(pieces)}
    assert found == set(range(0, SLICE, PIECE))


@pytest.mark.parametrize("across", [False, True])
def test_copies_write_without_conflicts(across: bool) -> None:
    shift = 3 if across else 2
    each = range(SLICE // PIECE)
    where = [place(e >> shift, e & ((1 << shift) - 1), across) for e in each]
    for start in range(0, len(where), 8):
        assert_apart(where[start : start + 8])


@pytest.mark.parametrize("across", [False, True])
def test_fragments_are_read_without_conflicts(across: bool) -> None:
    for at in range(0, TILE, PIECE):
        for k in range(0, STEP, PIECE):
            if across:
                assert_apart([place(k + row, at // PIECE, True) for row in range(8)])
            else:
                assert_apart([place(at + row, k // PIECE, False) for row in range(8)])
