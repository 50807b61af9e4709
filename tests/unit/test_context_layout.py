"""Which rank holds which tokens, who attends to whom, and how much work that is."""

import numpy as np
import pytest

from mpipar.errors import ConfigError
from mpipar.parallel.context.layout import (
    LAYOUTS,
    Task,
    context_positions,
    length_of,
    merged,
    positions_of,
    ranges_of,
    tasks,
)
from mpipar.parallel.context.ulysses import heads_of

SIZES = (0, 1, 2, 5, 16, 37)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_every_position_is_on_one_rank(layout: str, p: int) -> None:
    for n in SIZES:
        held = [context_positions(n, p, rank, layout) for rank in range(p)]
        assert sorted(np.concatenate(held)) == list(range(n))
        assert all((np.diff(positions) > 0).all() for positions in held)


def test_four_ranks_as_in_the_docstring() -> None:
    held = [context_positions(16, 4, rank, "zigzag").tolist() for rank in range(4)]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert context_positions(16, 4, 1, "ulysses").tolist() == [4, 5, 6, 7]
    assert ranges_of(16, 4, 3, "hybrid") == ((6, 10),)  # two blocks that are neighbours


def mask_of(found: list[Task], rows: int, keys: int) -> np.ndarray:
    """Return which pairs the tasks compute."""
    mask = np.zeros((rows, keys), int)
    for task in found:
        for i, row in enumerate(range(task.rows.start, task.rows.stop)):
            seen = task.seen if task.ahead is None else min(task.seen, task.ahead + i + 1)
            mask[row, :seen] += 1
    return mask


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("together", [1, 2])
def test_tasks_are_the_mask(layout: str, together: int) -> None:
    """Of single ranks, and of pairs of neighbours as one rank of a ring."""
    for n in SIZES:
        for p in (2, 4, 6):
            single = [ranges_of(n, p, rank, layout) for rank in range(p)]
            held = [
                merged([slice(*one) for ranges in single[i : i + together] for one in ranges])
                for i in range(0, p, together)
            ]
            for mine in held:
                for other in held:
                    q, k = positions_of(mine), positions_of(other)
                    for causal in (True, False):
                        found = tasks(mine, other, causal)
                        expected = (k <= q[:, None]) | (not causal)
                        np.testing.assert_array_equal(mask_of(found, len(q), len(k)), expected)
                        assert sum(task.pairs for task in found) == expected.sum()
                        assert len(found) <= 2


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_work_of_the_busiest_rank(p: int) -> None:
    n = 1003
    for layout, low, high in (("contiguous", 1.99 - 1 / p, 2.01 - 1 / p), ("zigzag", 1, 1.02)):
        held = [ranges_of(n, p, rank, layout) for rank in range(p)]
        work = [sum(t.pairs for k in held for t in tasks(q, k, True)) for q in held]
        assert sum(work) == n * (n + 1) // 2
        assert low <= max(work) * p / sum(work) <= high


def test_ranges_without_empty_ones() -> None:
    assert merged([slice(4, 6), slice(2, 4), slice(9, 9), slice(8, 9)]) == ((2, 6), (8, 9))
    assert length_of(((2, 6), (8, 9))) == 5
    assert positions_of(()).tolist() == []


def test_heads() -> None:
    seven = heads_of(7, 7, 4)
    assert [cut.stop - cut.start for cut in seven.queries] == [2, 2, 2, 1]
    assert seven.widths == (6, 6, 6, 3)
    few = heads_of(8, 2, 4)  # fewer kv heads than ranks: each goes to two
    assert few.shared == (slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2))
    assert few.local_kv(1) is None
    odd = heads_of(12, 3, 4)  # 3 query heads a rank, 4 a kv head
    assert [cut.stop - cut.start for cut in odd.queries] == [3, 3, 3, 3]
    assert [odd.local_kv(rank) for rank in range(4)] == [None, [0, 1, 1], [0, 0, 1], None]


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="layout='striped'"):
        context_positions(8, 2, 0, "striped")
    with pytest.raises(ConfigError, match="rank=2"):
        context_positions(8, 2, 2)
