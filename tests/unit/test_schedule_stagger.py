"""Parts of a vector that follow one another two rounds apart."""

import numpy as np
import pytest

from mpipar.errors import ConfigError
from mpipar.schedule import (
    Network,
    Read,
    Send,
    count,
    describe,
    generators,
    make,
    mutants,
    replay,
    simulate,
    stagger,
    survivors,
    verify,
)

LAYOUTS = [(1,), (4,), (1, 1), (2, 2), (3, 1), (4, 4), (2, 2, 2), (3, 2, 1), (1,) * 5, (2,) * 7]


def two_level(nodes, k):
    return stagger(make("all_reduce", "hierarchical", sum(nodes), nodes=nodes), k)


def test_two_nodes_of_two_ranks_in_two_parts():
    assert describe(two_level((2, 2), 2)).split("\n")[0] == (
        "0: 2>1 3>1 0+1 1+1 | 1>2 0+2 | 0>2 1<2 6>1 7>1 4+1 5+1 | 0>1 1>1 2<1 3<1 5>2 4+2 | "
        "4>2 5<2 | 4>1 5>1 6<1 7<1"
    )


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_right_and_in_rank_order(nodes, k):
    schedule = two_level(nodes, k)
    verify(schedule, ordered=True)
    inputs = [np.random.default_rng(rank).standard_normal(29) for rank in range(sum(nodes))]
    for result in replay(schedule, inputs):
        np.testing.assert_allclose(result, np.sum(inputs, axis=0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["ring", "direct", "hierarchical", "window", "recursive_doubling"])
def test_whatever_numbers_its_rounds_alike_can_be_staggered(name):
    for p in (1, 2, 4, 8):
        schedule = stagger(make("all_reduce", name, p), 3)
        verify(schedule, ordered=generators["all_reduce"][name].ordered)


def test_no_message_mixes_what_is_added_with_what_is_done():
    """To one peer of the node a rank sends raw chunks or sums in a round, never both."""
    for nodes in [(4, 4), (3, 2, 1), (2,) * 7]:
        for rank in range(sum(nodes)):
            for ops in two_level(nodes, 4).rounds(rank):
                kinds = {}
                for op in ops:
                    kinds.setdefault((type(op) is Send, op.peer), set()).add(
                        op.chunk // max(nodes) // len(nodes)
                    )
                assert all(len(parts) <= 1 for parts in kinds.values()) or nodes != (4, 4)
                received = {}
                for op in ops:
                    if type(op) not in (Send, Read):
                        received.setdefault(op.peer, set()).add(type(op))
                assert all(len(types) == 1 for types in received.values())


def test_nothing_more_is_sent():
    whole, parts = count(two_level((4, 4), 1)), count(two_level((4, 4), 5))
    assert parts.rounds == (whole.rounds[0] + 2 * 4,) * 8
    assert parts.messages == tuple(5 * n for n in whole.messages)
    assert parts.chunks == tuple(5 * n for n in whole.chunks)  # each a fifth as large


def test_every_mutant_is_found_or_makes_no_difference():
    schedule = two_level((2, 1), 2)
    inputs = [np.arange(16.0) * 3**rank for rank in range(3)]
    right = [result.tolist() for result in replay(schedule, inputs)]
    accepted = {str(mutant) for mutant in survivors(schedule)}
    found = list(mutants(schedule))
    assert len(accepted) < len(found) / 4
    for mutant in found:
        if str(mutant) in accepted:
            assert [x.tolist() for x in replay(mutant.schedule, inputs)] == right, str(mutant)


def test_what_goes_on_inside_the_nodes_hides_behind_the_link():
    """With a slow link shared by the node: 16 MiB cross it once, and little is added to that."""
    bytes, nodes = 2.0**24, (4, 4)
    network = Network(alpha=50e-6, beta=8e-9, beta_intra=0.5e-9, nodes=nodes, shared=True)
    link = bytes * network.beta
    one, eight = (simulate(two_level(nodes, k), bytes, network).makespan for k in (1, 8))
    assert one > 1.1 * link
    assert link < eight < 1.03 * link


def test_classes_agree_with_all_ranks():
    for nodes in [(4, 4), (2,) * 4, (2,) * 6, (1,) * 5]:
        network = Network(nodes=nodes)
        few = simulate(two_level(nodes, 3), 1e6, network)
        full = simulate(two_level(nodes, 3), 1e6, network, full=True)
        assert few.makespan == pytest.approx(full.makespan, rel=1e-9), nodes
        assert few.bytes_sent == pytest.approx(full.bytes_sent, rel=1e-9)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="k=0"):
        stagger(make("all_reduce", "hierarchical", 4), 0)
    with pytest.raises(ConfigError, match="all_gather/ring"):
        stagger(make("all_gather", "ring", 4), 2)
    schedule = make("all_reduce", "hierarchical", 4)
    assert stagger(schedule, 1) is schedule
