"""The shape of a mesh, without MPI: sizes, members of groups, and the errors."""

from itertools import product
from math import prod

import pytest

from mpipar.errors import ConfigError
from mpipar.parallel.mesh import members, nearest, resolve


def test_dp_is_what_is_left() -> None:
    assert resolve(8, 2, None, 1, 2, 1) == (2, 2, 1, 2)
    assert resolve(1, 1, None, 1, 1, 1) == (1, 1, 1, 1)
    assert resolve(6, 1, 3, 1, 2, 3) == (1, 3, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 2, 1, 3, 1), ("pp=1 dp=2 cp=1 tp=3", "number of ranks, 4", "pp=1 dp=2 cp=1 tp=2")),
        ((1, None, 1, 3, 1), ("dp=?", "pp*cp*tp = 3", "pp=1 dp=1 cp=1 tp=4")),
        ((1, None, 1, 8, 1), ("pp*cp*tp = 8", "pp=1 dp=1 cp=1 tp=4")),
        ((1, 4, 1, 1, 3), ("ep=3", "dp*cp = 4", "1, 2, 4")),
        ((0, None, 1, 1, 1), ("pp=0", "positive integer")),
        ((1, -1, 1, 1, 1), ("dp=-1", "positive integer")),
        ((1, None, 1, "2", 1), ("tp='2'", "positive integer")),
        ((1, None, True, 1, 1), ("cp=True", "positive integer")),
    ],
)
def test_sizes_that_cannot_be_name_what_can(sizes: tuple, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(4, *sizes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2, 1), (2, None, 1, 2, 1)])
def test_a_program_started_alone_is_told_how_to_start(sizes: tuple) -> None:
    with pytest.raises(ConfigError, match=r"Start it with `mpiexec -n 4 python PROGRAM`.* dp=1"):
        resolve(1, *sizes)


@pytest.mark.parametrize("ranks", [1, 2, 7, 12, 1024])
def test_every_nearest_shape_multiplies_to_the_ranks(ranks: int) -> None:
    for shape in nearest(ranks, resolve(24, 2, None, 1, 3, 1)):
        assert prod(shape.values()) == ranks


def test_members_of_a_group_are_ascending_and_split_the_grid() -> None:
    sizes = (2, 3, 1, 2)
    for varying in product((False, True), repeat=4):
        groups = {tuple(members(sizes, rank, varying)) for rank in range(12)}
        assert sorted(r for group in groups for r in group) == list(range(12))
        assert all(list(group) == sorted(group) for group in groups)


def test_members_as_the_picture_of_the_module_shows() -> None:
    sizes = (2, 2, 1, 2)
    assert members(sizes, 5, (False, False, False, True)) == [4, 5]
    assert members(sizes, 5, (False, True, False, False)) == [5, 7]
    assert members(sizes, 5, (True, False, False, False)) == [1, 5]
    assert members(sizes, 5, (False, True, False, True)) == [4, 5, 6, 7]
