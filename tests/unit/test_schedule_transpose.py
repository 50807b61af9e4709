"""The adjoint of every schedule: <A x, y> = <x, A' y>, and it is a right schedule itself."""

import numpy as np
import pytest

from mpipar.errors import ScheduleError
from mpipar.schedule import (
    count,
    describe,
    generators,
    make,
    replay,
    segment,
    transpose,
    verify,
)

NAMES = [f"{c}/{a}" for c, of in generators.items() for a, g in of.items() if not g.shared]
MOVING = [name for name in NAMES if not name.startswith("barrier")]

ADJOINTS = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
}


def vectors(schedule, sizes, rng):
    """Draw what each rank starts with; None on ranks that start with nothing."""
    held = [schedule.initial(rank)[:: schedule.parts] for rank in range(schedule.ranks)]
    lengths = [sum(sizes[chunk // schedule.parts] for chunk in chunks) for chunks in held]
    return [
        rng.standard_normal(n) if chunks else None for n, chunks in zip(lengths, held, strict=True)
    ]


def inner(xs, ys):
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    assert all(x.shape == y.shape for x, y in pairs)
    return sum(float(x @ y) for x, y in pairs)


def adjoint_sizes(schedule, sizes):
    """Return the sizes by the adjoint's blocks: those of all_to_all and shift are renumbered."""
    p = schedule.ranks
    if schedule.collective == "all_to_all":
        return [sizes[j * p + i] for i in range(p) for j in range(p)]
    if schedule.collective == "shift":
        return [sizes[(i - schedule.offset) % p] for i in range(p)]
    return sizes


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_inner_products(name, p):
    rng = np.random.default_rng(p)
    for root, offset, parts in ((0, 1, 1), (p - 1, -2, 1), (p // 2, 3, 2)):
        schedule = segment(make(*name.split("/"), p, root=root, offset=offset), parts)
        back = transpose(schedule)
        verify(back)
        sizes = rng.integers(0, 4, schedule.blocks).tolist()
        sizes_back = adjoint_sizes(schedule, sizes)
        x, y = vectors(schedule, sizes, rng), vectors(back, sizes_back, rng)
        forward = inner(replay(schedule, x, sizes=sizes), y)
        backward = inner(replay(back, y, sizes=sizes_back), x)
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 11])
def test_the_adjoint_of_the_adjoint_is_the_schedule(name, p):
    schedule = make(*name.split("/"), p, root=p - 1, offset=2)
    again = transpose(transpose(schedule))
    assert describe(again) == describe(schedule)
    assert again.name == schedule.name
    assert (again.root, again.offset % p) == (schedule.root, schedule.offset % p)


@pytest.mark.parametrize("name", MOVING)
def test_the_collective_and_the_messages(name):
    collective = name.split("/")[0]
    schedule = make(*name.split("/"), 6, root=2, offset=2)
    back = transpose(schedule)
    assert back.collective == ADJOINTS.get(collective, collective)
    assert back.root == schedule.root
    assert sum(count(back).messages) == sum(count(schedule).messages)
    assert sum(count(back).chunks) == sum(count(schedule).chunks)


def test_known_adjoints():
    """A tree is its own mirror image, and so is every symmetric exchange."""
    pairs = [
        ("broadcast/tree", "reduce/tree"),
        ("gather/tree", "scatter/tree"),
        ("gather/linear", "scatter/linear"),
        ("all_gather/direct", "reduce_scatter/direct"),
        ("shift/ring", "shift/ring"),
    ]
    for one, other in pairs:
        left = transpose(make(*one.split("/"), 6, root=4, offset=2))
        right = make(*other.split("/"), 6, root=4, offset=-2)
        as_sets = [
            [[set(ops) for ops in s.rounds(rank)] for rank in range(6)] for s in (left, right)
        ]
        assert as_sets[0] == as_sets[1]


def test_several_sends_of_one_chunk_come_back_as_a_recv_and_sums():
    """What was sent to three ranks and is not kept comes back from three ranks in one round."""
    assert describe(transpose(make("broadcast", "tree", 2))) == "0: 0+1\n1: 0>0"
    linear = transpose(make("scatter", "linear", 3))
    assert describe(linear) == "0: 1<1 2<2\n1: 1>0\n2: 2>0"
    back = transpose(make("all_reduce", "direct", 3))
    assert describe(back).split("\n")[0] == "0: 0+1 0+2 1>1 2>2 | 1<1 2<2 0>1 0>2"


def test_a_barrier_is_its_own_adjoint():
    schedule = make("barrier", "dissemination", 5)
    assert transpose(schedule) is schedule


def test_a_message_that_brings_nothing_has_no_adjoint():
    schedule = make("gather", "linear", 3)
    wasteful = schedule.with_rounds(lambda rank: make("all_gather", "direct", 3).rounds(rank))
    with pytest.raises(
        ScheduleError, match="rank 1 in round 0 receives 2<2 0<0, which nobody uses"
    ):
        list(transpose(wasteful).rounds(1))
