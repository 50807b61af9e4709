"""All_reduce in shared memory: the schedule, and what its consumers make of reads."""

import re

import numpy as np
import pytest

from mpipar.errors import ScheduleError
from mpipar.partition import blocks
from mpipar.schedule import (
    CommSchedule,
    Network,
    algorithms,
    count,
    describe,
    draw,
    make,
    mutants,
    parse_rounds,
    replay,
    segment,
    simulate,
    survivors,
    transpose,
    verify,
)


def written(*lines, nodes, chunks=1):
    """Return the all_reduce that the lines describe, one for each rank."""
    programs = [parse_rounds(line) for line in lines]
    return CommSchedule(
        "all_reduce",
        "written",
        len(lines),
        chunks,
        lambda rank: iter(programs[rank]),
        shared=nodes,
    )


def layouts(p):
    """Return node layouts of p ranks: one node, one rank a node, even and uneven ones."""
    found = {(p,), (1,) * p, *(blocks(p, nodes) for nodes in (2, 3) if nodes <= p)}
    return sorted(found | ({(p - 1, 1), (1, p - 1)} if p > 1 else set()))


def test_one_node_of_4_ranks():
    assert describe(make("all_reduce", "window", 4, nodes=(4,))) == (
        "0: 0&1 0&2 0&3 | 1@1 2@2 3@3\n"
        "1: 1&2 1&3 1&0 | 2@2 3@3 0@0\n"
        "2: 2&3 2&0 2&1 | 3@3 0@0 1@1\n"
        "3: 3&0 3&1 3&2 | 0@0 1@1 2@2"
    )


def test_a_rank_alone_on_its_node_keeps_the_rounds():
    assert describe(make("all_reduce", "window", 4, nodes=(3, 1))).split("\n")[3] == (
        "3: - | 0>0 1+0 2>1 3+1 4>2 5+2 | 1>0 0<0 3>1 2<1 5>2 4<2 | -"
    )


@pytest.mark.parametrize("p", [*range(1, 17), 33])
def test_right_and_in_rank_order_on_every_layout(p):
    for nodes in layouts(p):
        schedule = make("all_reduce", "window", p, nodes=nodes)
        verify(schedule, ordered=True)
        verify(segment(schedule, 3), ordered=True)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_replay_adds_in_rank_order(p):
    values = [1e16, 1.0, -1e16, 1.0, 3.0, 1e16, -1e16][:p]
    inputs = [np.full(11, value) for value in values]
    expected = inputs[0]
    for x in inputs[1:]:
        expected = expected + x
    for result in replay(make("all_reduce", "window", p, nodes=(p,)), inputs):
        assert result.tobytes() == expected.tobytes()
    draws = [np.random.default_rng(rank).standard_normal(29) for rank in range(p)]
    for nodes in layouts(p):
        for result in replay(make("all_reduce", "window", p, nodes=nodes), draws):
            np.testing.assert_allclose(result, np.sum(draws, axis=0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("nodes", [(5,), (3, 2), (4, 1)])
def test_every_mutant_is_found_or_makes_no_difference(nodes):
    schedule = make("all_reduce", "window", 5, nodes=nodes)
    inputs = [np.arange(12.0) * 3**rank for rank in range(5)]
    right = [result.tolist() for result in replay(schedule, inputs)]
    accepted = {str(mutant) for mutant in survivors(schedule)}
    if nodes == (5,):
        assert not accepted  # two rounds: nothing can move
    for mutant in mutants(schedule):
        if str(mutant) in accepted:
            assert mutant.change in ("late", "early"), str(mutant)
            assert [x.tolist() for x in replay(mutant.schedule, inputs)] == right, str(mutant)
            continue
        with pytest.raises(ScheduleError, match=r"round \d|deadlock"):
            verify(mutant.schedule)


@pytest.mark.parametrize(
    ("lines", "nodes", "text"),
    [
        (("0&1 | -", "- | 0@0"), (1, 1), r"rank 0 in round 0 reads chunk 0 of rank 1, with which"),
        (("0&1", "0@0"), (2,), r"rank 1 ends with the contributions of ranks \[0\]"),
        (("0&1", "0&0 | 0@0"), (2,), r"not been used when rank 1 in round 1 replaces it"),
        (("0&1 0&1", "- | 0@0"), (2,), r"contributions of ranks \[1\] twice"),
        (("0@1 0@1", "- | 0@0"), (2,), r"replaces chunk 0 twice"),
    ],
)
def test_wrong_reads_are_found(lines, nodes, text):
    with pytest.raises(ScheduleError, match=text):
        verify(written(*lines, nodes=nodes))


def test_a_read_takes_what_was_there_at_the_start_of_the_round():
    """Both read each other at once; a rank that has ended keeps what it has."""
    verify(written("0&1", "0&0", nodes=(2,)))
    verify(written("0&1", "- | - | 0@0", nodes=(2,)))
    verify(written("- | - | 0&1", "- | - | - | 0@0", nodes=(2,)))
    three = written("0&1 0&2", "- | 0@0", "- | - | 0@1", nodes=(3,))
    verify(three)
    with pytest.raises(ScheduleError):
        verify(written("0&1 0&2", "- | 0@0", "- | 0@1", nodes=(3,)))


def test_deadlock_names_the_read():
    """Rank 0 waits for a message that rank 1 sends only when rank 0 has come to round 1."""
    schedule = written("0+1 | -", "- | 0@0 | 0>0", nodes=(2,))
    words = r"rank 0 in round 0 waits for chunks \[0\] from rank 1; rank 1 in round 1 waits to read"
    with pytest.raises(ScheduleError, match=f"with eager ones too.*{words}"):
        verify(schedule)


def test_messages_only_across_nodes():
    one = count(make("all_reduce", "window", 4, nodes=(4,)))
    assert (one.messages, one.reads) == ((0,) * 4, (6,) * 4)
    two = count(make("all_reduce", "window", 4, nodes=(2, 2)))
    flat = count(make("all_reduce", "hierarchical", 4, nodes=(2, 2)))
    assert (two.messages, two.reads) == ((2,) * 4, (4,) * 4)
    assert flat.messages == (4,) * 4
    assert flat.reads == ()


def test_drawn_with_double_lines():
    picture = draw(make("all_reduce", "window", 2, nodes=(2,)))
    assert "0 messages, 4 reads" in picture
    assert re.search(r"\|=+ \+1 =+>\|", picture)
    assert "<svg" in draw(make("all_reduce", "window", 4), format="svg")


def test_simulated_like_messages_without_sends():
    for nodes in ((4,), (2, 2), (3, 1), (4, 4), (2,) * 8):
        network = Network(nodes=nodes)
        schedule = make("all_reduce", "window", sum(nodes), nodes=nodes)
        found = simulate(schedule, 1e6, network)
        assert found.makespan == pytest.approx(simulate(schedule, 1e6, network, full=True).makespan)
        assert found.messages == sum(count(schedule).messages)
    late = written("0&1", "- | 0@0", nodes=(2,))
    network = Network(alpha_intra=1.0, beta_intra=0.5, gamma=0.25, nodes=2)
    assert simulate(late, 8.0, network).makespan == pytest.approx((1 + 4) + 2 + (1 + 4))


def test_what_cannot_be_transposed_says_so():
    with pytest.raises(ScheduleError, match="hierarchical"):
        transpose(make("all_reduce", "window", 4))


def test_not_among_those_that_run_on_any_arrays():
    assert "window" not in algorithms("all_reduce")
    assert "window" in algorithms("all_reduce", shared=True)
