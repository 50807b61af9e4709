"""Exact numbers of rounds, messages and bytes, against the published formulas."""

from math import ceil, log2

import pytest

from mpipar.schedule import Send, count, generators, make, segment

POWERS = [1, 2, 4, 8, 16, 32]
ANY = [*range(1, 14), 16, 17, 31, 32]


def folded(p):
    """Return log2 of the largest power of two in p, and the rounds that folding adds."""
    return p.bit_length() - 1, 0 if p & (p - 1) == 0 else 2


def rounds(name, p, **options):
    return max(count(make(*name.split("/"), p, **options)).rounds)


def sent(name, p, size, **options):
    """Return how much each rank sends of `size` in all, if all chunks are equal."""
    schedule = make(*name.split("/"), p, **options)
    return [chunks * size / schedule.chunks for chunks in count(schedule).chunks]


@pytest.mark.parametrize("p", ANY)
def test_rounds(p):
    bits, extra = folded(p)
    depth = ceil(log2(p))
    one = int(p > 1)
    expected = {
        "all_reduce/ring": 2 * (p - 1),
        "all_reduce/recursive_doubling": bits + extra,
        "all_reduce/halving_doubling": 2 * bits + extra,
        "all_reduce/tree": 2 * depth,
        "all_reduce/direct": 2 * one,
        "reduce_scatter/ring": p - 1,
        "reduce_scatter/recursive_halving": bits + extra,
        "reduce_scatter/pairwise": p - 1,
        "reduce_scatter/direct": one,
        "all_gather/ring": p - 1,
        "all_gather/bruck": depth,
        "all_gather/recursive_doubling": bits + extra,
        "all_gather/direct": one,
        "all_to_all/pairwise": p - 1,
        "all_to_all/bruck": depth,
        "all_to_all/direct": one,
        "reduce/linear": one,
        "gather/linear": one,
        "scatter/linear": one,
        "barrier/dissemination": depth,
        "shift/ring": one,
    }
    assert {name: rounds(name, p) for name in expected} == expected
    for name in ("broadcast/tree", "reduce/tree", "gather/tree", "scatter/tree"):
        assert all(rounds(name, p, root=root) <= depth for root in range(p))
        assert rounds(name, p) == depth
    assert rounds("broadcast/scatter_all_gather", p) <= depth + p - 1


@pytest.mark.parametrize("p", ANY)
def test_bytes_of_what_is_best_possible(p):
    """Each rank sends S (p-1)/p, and twice that for an all_reduce, for any number of ranks."""
    size = 840 * p
    best = size * (p - 1) / p
    assert sent("all_reduce/ring", p, size) == [2 * best] * p
    assert sent("all_reduce/direct", p, size) == [2 * best] * p
    for algorithm in ("ring", "pairwise", "direct"):
        assert sent(f"reduce_scatter/{algorithm}", p, size) == [best] * p
    for algorithm in ("ring", "bruck", "direct"):
        assert sent(f"all_gather/{algorithm}", p, size) == [best] * p
    for algorithm in ("pairwise", "direct"):
        assert sent(f"all_to_all/{algorithm}", p, size * p) == [best] * p


@pytest.mark.parametrize("p", POWERS)
def test_bytes_of_powers_of_two(p):
    size, bits = 96 * p, p.bit_length() - 1
    best = size * (p - 1) / p
    assert sent("all_reduce/halving_doubling", p, size) == [2 * best] * p
    assert sent("all_reduce/recursive_doubling", p, size) == [size * bits] * p
    assert sent("reduce_scatter/recursive_halving", p, size) == [best] * p
    assert sent("all_gather/recursive_doubling", p, size) == [best] * p
    assert sent("all_to_all/bruck", p, size * p) == [size / 2 * bits] * p


@pytest.mark.parametrize("p", ANY)
def test_bruck_moves_the_blocks_with_a_bit_set_in_each_round(p):
    schedule = make("all_to_all", "bruck", p)
    for rank in range(p):
        for k, ops in enumerate(schedule.rounds(rank)):
            blocks = sum(type(op) is Send for op in ops)
            assert blocks == sum(d >> k & 1 for d in range(p))
            assert blocks <= 2 ** max(p - 1, 1).bit_length() / 2


@pytest.mark.parametrize("p", ANY)
def test_nothing_travels_twice_to_the_same_rank(p):
    """Gathering brings each rank the p-1 blocks it lacks, whatever the algorithm and the root."""
    for algorithm in generators["all_gather"]:
        assert sum(count(make("all_gather", algorithm, p)).chunks) == p * (p - 1)
    for root in range(p):
        broadcast = make("broadcast", "scatter_all_gather", p, root=root)
        assert sum(count(broadcast).chunks) == p * (p - 1)
        for collective in ("broadcast", "reduce"):
            assert sum(count(make(collective, "tree", p, root=root)).chunks) == p - 1


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12])
def test_folding_in_and_out_costs_the_whole_vector_each_way(p):
    size, bits = 64, p.bit_length() - 1
    exchange = 2 * size * (2**bits - 1) / 2**bits
    pairs = p - 2**bits
    expected = [exchange + size, size] * pairs + [exchange] * (p - 2 * pairs)
    assert sent("all_reduce/halving_doubling", p, size) == expected


@pytest.mark.parametrize(("n", "local"), [(2, 2), (4, 2), (2, 4), (8, 4)])
def test_hierarchical_sends_an_nth_across(n, local):
    p, size = n * local, 1680
    inside = 2 * (local - 1) / local * size
    across = 2 * (n - 1) / n * size / local
    schedule = make("all_reduce", "hierarchical", p, nodes=(local,) * n)
    assert sent("all_reduce/hierarchical", p, size, nodes=(local,) * n) == [inside + across] * p
    assert count(schedule).rounds == (2 + 2 * n.bit_length() - 2,) * p
    crossing = [
        op.chunk
        for ops in schedule.rounds(0)
        for op in ops
        if type(op) is Send and op.peer // local != 0
    ]
    assert len(crossing) * size / schedule.chunks == across


def test_messages_count_peers_and_rounds_not_chunks():
    assert count(make("all_gather", "bruck", 8)).messages == (3,) * 8
    assert count(make("gather", "tree", 8)).messages == (0, 1, 1, 1, 1, 1, 1, 1)
    assert count(make("gather", "tree", 8)).chunks == (0, 1, 2, 1, 4, 1, 2, 1)
    assert count(make("all_reduce", "direct", 5)).messages == (8,) * 5


def test_segments_multiply_messages_and_rounds_not_bytes():
    whole = count(make("all_reduce", "ring", 5))
    cut = count(segment(make("all_reduce", "ring", 5), 4))
    assert cut.messages == tuple(4 * n for n in whole.messages)
    assert cut.rounds == tuple(4 * n for n in whole.rounds)
    assert cut.chunks == tuple(4 * n for n in whole.chunks)  # each a quarter as large
