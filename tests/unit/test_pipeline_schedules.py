"""The generators of pipeline schedules: pictures, idle shares, activations held, gradients."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import ConfigError, ScheduleError
from mpipar.schedule.pipeline import (
    PIPELINES,
    Action,
    PipelineSchedule,
    lower,
    make,
    parse_action,
    parse_actions,
    peak_live,
    pipelines,
    simulate,
    slots,
    verify,
)
from tests.unit.pipeline_replay import dense, replay

GOLDEN = {
    ("gpipe", 8): """
F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  .  .  B0 B1 B2 B3 B4 B5 B6 B7
.  F0 F1 F2 F3 F4 F5 F6 F7 .  .  .  .  B0 B1 B2 B3 B4 B5 B6 B7
.  .  F0 F1 F2 F3 F4 F5 F6 F7 .  .  B0 B1 B2 B3 B4 B5 B6 B7
.  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
""",
    ("gpipe", 3): """
F0 F1 F2 .  .  .  .  .  .  B0 B1 B2
.  F0 F1 F2 .  .  .  .  B0 B1 B2
.  .  F0 F1 F2 .  .  B0 B1 B2
.  .  .  F0 F1 F2 B0 B1 B2
""",
    ("1f1b", 8): """
F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
.  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7
.  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
""",
    ("1f1b", 3): """
F0 F1 F2 .  .  .  .  B0 .  B1 .  B2
.  F0 F1 F2 .  .  B0 .  B1 .  B2
.  .  F0 F1 .  B0 F2 B1 .  B2
.  .  .  F0 B0 F1 B1 F2 B2
""",
    ("interleaved", 8): """
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 .   .   4F4 4B2 4F5 4B3 4F6 0B0 \
4F7 0B1 0B2 0B3 .   4B4 .   4B5 .   4B6 .   4B7 0B4 0B5 0B6 0B7
.   1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 \
1B2 5F7 1B3 .   5B4 .   5B5 .   5B6 .   5B7 1B4 1B5 1B6 1B7
.   .   2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 \
6F5 2B3 6F6 6B4 6F7 6B5 .   6B6 .   6B7 2B4 2B5 2B6 2B7
.   .   .   3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 \
3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
""",
    ("interleaved", 3): """
0F0 0F1 0F2 .   4F0 4F1 4F2 .   .   .   .   4B0 .   4B1 .   4B2 0B0 0B1 .   0B2
.   1F0 1F1 1F2 .   5F0 5F1 5F2 .   .   5B0 .   5B1 .   5B2 1B0 1B1 .   1B2
.   .   2F0 2F1 2F2 .   6F0 6F1 6F2 6B0 .   6B1 .   6B2 2B0 2B1 .   2B2
.   .   .   3F0 3F1 3F2 .   7F0 7B0 7F1 7B1 7F2 7B2 3B0 3B1 .   3B2
""",
    ("zb1p", 8): """
F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
.  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
.  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
.  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
""",
    ("zb1p", 3): """
F0 F1 F2 .  .  .  .  B0 W0 B1 W1 B2 W2
.  F0 F1 F2 .  .  B0 .  B1 W0 B2 W1 W2
.  .  F0 F1 .  B0 F2 B1 .  B2 W0 W1 W2
.  .  .  F0 B0 F1 B1 F2 B2 W0 W1 W2
""",
    ("zbv", 3): """
0F0 0F1 0F2 .   .   .   .   7F0 7B0 7W0 7F1 7B1 7W1 7F2 7B2 7W2 .   .   0B0 0W0 .   0B1 \
0W1 .   0B2 0W2
.   1F0 1F1 1F2 .   .   6F0 .   6F1 6B0 6W0 6F2 6B1 6W1 .   6B2 6W2 1B0 1W0 .   1B1 1W1 .   \
1B2 1W2
.   .   2F0 2F1 2F2 5F0 .   5F1 .   5F2 5B0 5W0 .   5B1 5W1 2B0 2W0 5B2 5W2 2B1 2W1 .   2B2 2W2
.   .   .   3F0 4F0 3F1 4F1 3F2 4F2 .   .   4B0 4W0 3B0 3W0 4B1 4W1 3B1 3W1 4B2 4W2 3B2 3W2
""",
}


def picture(schedule: PipelineSchedule) -> list[list[str]]:
    """Return the words of each rank's slots, without the stage where each rank has one."""
    one = schedule.chunks == 1
    return [
        ["." if action is None else str(action)[one * len(str(action.stage)) :] for action in row]
        for row in slots(schedule).rows
    ]


@pytest.mark.parametrize(("name", "m"), GOLDEN)
def test_four_ranks(name: str, m: int) -> None:
    assert picture(make(name, 4, m)) == [line.split() for line in GOLDEN[name, m].split("\n")[1:-1]]


def sizes(most_ranks: int, most_microbatches: int) -> list[tuple[int, int]]:
    return [(p, m) for p in range(1, most_ranks + 1) for m in range(1, most_microbatches + 1)]


def share(schedule: PipelineSchedule) -> Fraction:
    """Return the idle share of the makespan, exactly, from times of 1 for F, B and W."""
    found = simulate(schedule)
    busy = sum(Fraction(s.stop - s.start) for s in found.timeline.spans)
    exact = 1 - busy / (schedule.ranks * Fraction(found.makespan))
    assert found.bubble == pytest.approx(float(exact), abs=1e-12)
    return exact


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 5), (3, 2), (4, 8), (5, 3), (7, 16)])
def test_idle_share_without_splitting(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert share(make(name, p, m)) == Fraction(p - 1, m + p - 1)
    uneven = simulate(make("1f1b", p, m), forward=2.0, backward=3.0, weight=0.5)
    assert uneven.makespan == 5.5 * (m + p - 1)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 6), (3, 9), (4, 4), (4, 8), (6, 12)])
def test_idle_share_of_interleaved(p: int, m: int, v: int) -> None:
    schedule = make("interleaved", p, m, chunks=v)
    assert share(schedule) == Fraction(p - 1, v * m + p - 1)
    whole, parts = make("1f1b", p, m), simulate(schedule, 1 / v, 1 / v, 1 / v)
    assert parts.makespan <= simulate(whole).makespan + 1e-9


@pytest.mark.parametrize(("p", "m"), [(4, 5), (4, 6), (4, 7), (3, 4), (3, 11), (5, 13)])
def test_interleaved_with_a_remainder_loses_nothing(p: int, m: int) -> None:
    assert share(make("interleaved", p, m)) == Fraction(p - 1, 2 * m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (6, 12)])
def test_idle_share_of_zero_bubble(p: int, m: int) -> None:
    assert share(make("zb1p", p, m)) == Fraction(p - 1, 3 * m + p - 1)
    assert share(make("zbv", p, m)) == Fraction(p - 1, 6 * m + p - 1)


def test_activations_held() -> None:
    for p, m in sizes(5, 11):
        assert peak_live(make("gpipe", p, m)) == (m,) * p
        assert peak_live(make("1f1b", p, m)) == tuple(min(p - r, m) for r in range(p))
        assert max(peak_live(make("zb1p", p, m))) == min(p, m)
        assert max(peak_live(make("zbv", p, m))) <= min(2 * p, 2 * m)
        assert simulate(make("1f1b", p, m)).peak_live == peak_live(make("1f1b", p, m))
    for v in (2, 3):
        first = peak_live(make("interleaved", 4, 12, chunks=v))[0]
        assert first == 4 * v + 3  # Megatron: 1 + (p-1)/(p v) of 1F1B's p v


def test_every_size_is_right() -> None:
    for p, m in sizes(4, 9):
        for name in pipelines():
            for v in (1, 2, 3) if name == "interleaved" else (None,):
                schedule = make(name, p, m, v)
                verify(schedule)
                verify(lower(schedule))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(pipelines()),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    chunks=st.integers(1, 3),
)
def test_gradients_are_those_of_the_whole_model(name: str, p: int, m: int, chunks: int) -> None:
    schedule = make(name, p, m, chunks if name == "interleaved" else None)
    expected = dense(schedule.stages, m)
    assert replay(schedule) == expected
    lowered = lower(schedule)
    assert lowered.computation() == schedule
    assert replay(lowered) == expected


@pytest.mark.parametrize("name", pipelines())
def test_gradients_add_in_one_order(name: str) -> None:
    last = "W" if make(name, 4, 9).split else "B"
    for row in make(name, 4, 9).actions:
        for stage in {action.stage for action in row}:
            added = [a.microbatch for a in row if a.kind == last and a.stage == stage]
            assert added == list(range(9))


def test_lowered_as_text() -> None:
    assert str(lower(make("1f1b", 2, 3))) == (
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2\n"
        "1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2"
    )
    turn = lower(make("zbv", 2, 1))  # stages 1 and 2 are both on rank 1: no message between them
    assert str(turn).split("\n")[1] == (
        "1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2W0 1B0 1SEND_B0 1W0"
    )
    assert not lower(make("interleaved", 1, 3)).lowered
    with pytest.raises(ScheduleError, match="has messages already"):
        lower(turn)


def test_ends_of_a_message() -> None:
    schedule = make("interleaved", 3, 3)
    assert schedule.message(Action(2, "F", 1)) == (Action(2, "SEND_F", 1), Action(3, "RECV_F", 1))
    assert schedule.message(Action(5, "F", 1)) is None
    assert schedule.message(Action(0, "B", 1)) is None
    assert [schedule.peer(parse_action(word)) for word in ("2SEND_F0", "3RECV_F0")] == [0, 2]
    assert [schedule.peer(parse_action(word)) for word in ("3SEND_B0", "2RECV_B0")] == [2, 0]
    assert schedule.held(1) == (1, 4)
    assert (schedule.ranks, schedule.stages, schedule.chunks) == (3, 6, 2)


def test_actions_as_text() -> None:
    words = "2F0 1B3 0W1 12SEND_F7 3RECV_B10"
    assert " ".join(map(str, parse_actions(words))) == words
    assert parse_actions("0F0 0I0 0F1 0B1 0W0") == parse_actions("0F0 0B0 0F1 0B1 0W1 0W0")
    for wrong in ("", "F0", "0G0", "0F", "0f0", "-1F0", "0F0 ", "\u0661F0", "0F99999999999"):
        with pytest.raises(ScheduleError, match="Write it like 2F0"):
            parse_action(wrong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("1f2b", 4, 8), "schedule='1f2b': the pipeline schedules are gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 8), "p=0"),
        (("1f1b", 4, 0), "microbatches=0"),
        (("1f1b", 4, 8, 2), "chunks=2: 1f1b has 1 on each rank"),
        (("zbv", 4, 8, 3), "chunks=3: zbv has 2 on each rank"),
        (("interleaved", 4, 8, 0), "chunks=0: interleaved has at least one"),
    ],
)
def test_what_cannot_be_made(call: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(*call)


def test_measured_messages_keep_ranks_busy() -> None:
    schedule = lower(make("gpipe", 2, 1))  # 0F0 send; recv 1F0 1B0 send; recv 0B0
    words = {"0SEND_F0": 1.0, "1RECV_F0": 0.5, "1SEND_B0": 2.0, "0RECV_B0": 4.0}
    times = {parse_action(word): seconds for word, seconds in words.items()}
    found = simulate(schedule, send=0.25, measured=times)
    starts = {span.name: span.start for span in found.timeline.spans}
    last = 1 + 1.0 + 0.25  # the first F, its message posted, on its way
    # rank 1 computes B for 2 seconds at once; rank 0 has posted its receive long before
    assert starts == {"0F0": 0.0, "1F0": last, "1B0": last + 1, "0B0": last + 3 + 2.0 + 0.25}


def test_simulated_times() -> None:
    schedule = make("1f1b", 2, 2)
    found = simulate(schedule, forward=[1.0, 2.0], backward=[3.0, 4.0], weight=0.0, send=10.0)
    assert [(s.rank, s.name, s.kind, s.start, s.stop) for s in found.timeline.spans] == [
        (0, "0F0", "forward", 0, 1),
        (0, "0F1", "forward", 1, 2),
        (1, "1F0", "forward", 11, 13),
        (1, "1B0", "backward", 13, 17),
        (0, "0B0", "backward", 27, 30),
        (1, "1F1", "forward", 17, 19),
        (1, "1B1", "backward", 19, 23),
        (0, "0B1", "backward", 33, 36),
    ]
    assert found.bubble == pytest.approx(1 - (8 + 12) / 72)
    slow = simulate(schedule, measured={Action(1, "F", 1): 7.0})
    assert slow.makespan == simulate(schedule).makespan + 6.0
    assert simulate(lower(schedule)).makespan == simulate(schedule).makespan
    for wrong in ({"forward": [1.0]}, {"weight": -1.0}, {"send": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            simulate(schedule, **wrong)


def test_the_table_says_where_they_come_from() -> None:
    assert tuple(PIPELINES) == ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
    assert all("20" in kind.about for kind in PIPELINES.values())
