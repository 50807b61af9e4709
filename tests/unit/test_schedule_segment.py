import pytest

from mpipar.errors import ConfigError
from mpipar.schedule import describe, generators, make, segment, verify

NAMES = [f"{c}/{a}" for c, of in generators.items() for a in of]


def test_each_round_becomes_one_round_for_each_part():
    schedule = segment(make("all_reduce", "ring", 2), 2)
    assert describe(schedule) == (
        "0: 2>1 0+1 | 3>1 1+1 | 0>1 2<1 | 1>1 3<1\n1: 0>0 2+0 | 1>0 3+0 | 2>0 0<0 | 3>0 1<0"
    )
    assert (schedule.chunks, schedule.parts, schedule.blocks) == (4, 2, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_segments_verify(name, p):
    collective, algorithm = name.split("/")
    schedule = make(collective, algorithm, p, root=p // 2)
    ordered = generators[collective][algorithm].ordered
    for k in (2, 3):
        verify(segment(schedule, k), ordered=ordered)


def test_segmenting_again_cuts_the_parts():
    schedule = segment(segment(make("reduce_scatter", "ring", 3), 2), 3)
    assert (schedule.parts, schedule.chunks, schedule.blocks) == (6, 18, 3)
    assert schedule.final(1) == [6, 7, 8, 9, 10, 11]
    verify(schedule)


def test_one_part_is_the_schedule_itself():
    schedule = make("all_reduce", "ring", 3)
    assert segment(schedule, 1) is schedule


def test_no_part_is_an_error():
    with pytest.raises(ConfigError, match="k=0"):
        segment(make("all_reduce", "ring", 3), 0)
