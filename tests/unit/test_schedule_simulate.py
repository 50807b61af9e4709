"""The simulation: closed formulas, classes of ranks against all ranks, and the model's rules."""

import sys
from collections.abc import Callable, Iterator
from math import ceil, log2

import pytest

from mpipar.errors import ConfigError, ScheduleError
from mpipar.schedule import (
    CommSchedule,
    Network,
    Round,
    generators,
    make,
    parse_rounds,
    segment,
    simulate,
)
from mpipar.schedule.network import bus_bandwidth, chunk_bytes

A, B, G = 3e-6, 0.1e-9, 0.07e-9
FLAT = Network(alpha=A, beta=B, gamma=G)
LEVELS = {"alpha": A, "beta": B, "gamma": G, "alpha_intra": 0.4e-6, "beta_intra": 0.03e-9}
SIZES = (8.0, 1e5, 1e8)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def written(text: str, **changes: int) -> CommSchedule:
    """Return a schedule of one chunk from a line of text for each rank."""
    lines = text.strip().splitlines()

    def rounds(rank: int) -> Iterator[Round]:
        return iter(parse_rounds(lines[rank]))

    return CommSchedule("all_reduce", "written", len(lines), changes.get("chunks", 1), rounds)


# Name, rank counts, and the time as a function of p and the bytes n of the whole vector.
FORMULAS: list[tuple[str, tuple[int, ...], Callable[[int, float], float]]] = [
    (
        "all_reduce/ring",
        (2, 3, 4, 7, 16),
        lambda p, n: 2 * (p - 1) * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * G,
    ),
    ("reduce_scatter/ring", (2, 3, 8), lambda p, n: (p - 1) * (A + n / p * (B + G))),
    ("all_gather/ring", (2, 3, 8), lambda p, n: (p - 1) * (A + n / p * B)),
    (
        "all_reduce/direct",
        (2, 3, 5, 8),
        lambda p, n: 2 * (p - 1) * A + 2 * (p - 1) / p * n * B + (p - 1) / p * n * G,
    ),
    ("all_reduce/recursive_doubling", (2, 4, 16), lambda p, n: log2(p) * (A + n * (B + G))),
    (
        "all_reduce/recursive_doubling",
        (3, 5, 6, 7, 12),  # fold in, exchange, fold out
        lambda p, n: (2 + int(log2(p))) * (A + n * B) + (1 + int(log2(p))) * n * G,
    ),
    (
        "all_reduce/halving_doubling",
        (2, 4, 32),
        lambda p, n: 2 * log2(p) * A + (p - 1) / p * n * (2 * B + G),
    ),
    (
        "all_reduce/halving_doubling",
        (3, 5, 6, 7, 12),
        lambda p, n: (
            2 * int(log2(p)) * A
            + (1 - 0.5 ** int(log2(p))) * n * (2 * B + G)
            + 2 * (A + n * B)
            + n * G
        ),
    ),
    ("all_reduce/tree", (2, 4, 8), lambda p, n: log2(p) * (2 * A + n * (2 * B + G))),
    (
        "reduce_scatter/recursive_halving",
        (2, 4, 16),
        lambda p, n: log2(p) * A + (p - 1) / p * n * (B + G),
    ),
    (
        "reduce_scatter/pairwise",  # what is sent next needs no addition: only the last one shows
        (2, 3, 8),
        lambda p, n: (p - 1) * (A + n / p * B) + n / p * G,
    ),
    ("all_gather/bruck", (2, 3, 7, 8), lambda p, n: ceil(log2(p)) * A + (p - 1) / p * n * B),
    ("all_to_all/pairwise", (2, 3, 8), lambda p, n: (p - 1) * (A + n / p * B)),
    ("all_to_all/bruck", (2, 4, 16), lambda p, n: log2(p) * (A + n / 2 * B)),
    ("broadcast/tree", (2, 4, 8), lambda p, n: log2(p) * (A + n * B)),
    ("scatter/linear", (2, 5), lambda p, n: (p - 1) * (A + n / p * B)),
    ("gather/linear", (2, 5), lambda p, n: A + (p - 1) / p * n * B),
    ("barrier/dissemination", (2, 3, 8, 9), lambda p, n: ceil(log2(p)) * A),
    ("shift/ring", (2, 5), lambda p, n: A + n * B),
]


@pytest.mark.parametrize(
    ("name", "counts", "formula"), FORMULAS, ids=lambda v: v if type(v) is str else ""
)
def test_closed_formulas(
    name: str, counts: tuple[int, ...], formula: Callable[[int, float], float]
) -> None:
    for p in counts:
        for n in SIZES:
            result = simulate(make(*name.split("/"), p), n, FLAT)
            assert result.makespan == close(formula(p, n)), (p, n)


def test_one_rank_takes_no_time() -> None:
    for collective, of in generators.items():
        for algorithm in of:
            result = simulate(make(collective, algorithm, 1), 1e6)
            assert (result.makespan, result.messages, result.bytes_sent) == (0, 0, 0)


def layouts(p: int) -> list[int | tuple[int, ...] | None]:
    return [None, 2, 3, 4, (p,)]


def declared() -> list[str]:
    return [
        f"{collective}/{algorithm}"
        for collective, of in generators.items()
        for algorithm, generator in of.items()
        if generator.symmetry is not None
    ]


def test_the_algorithms_for_many_ranks_declare_classes() -> None:
    assert {f"all_reduce/{name}" for name in (
        "ring", "direct", "recursive_doubling", "halving_doubling", "hierarchical"
    )} <= set(declared())  # fmt: skip


@pytest.mark.parametrize("name", declared())
def test_classes_agree_with_all_ranks(name: str) -> None:
    fewer = 0
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 20):
        for nodes in layouts(p):
            sizes = Network(nodes=nodes).layout(p)
            schedule = make(*name.split("/"), p, nodes=sizes)
            for shared in (False, True):
                network = Network(**LEVELS, nodes=nodes, shared=shared)
                fewer += same(schedule, network)
            if name == "all_reduce/hierarchical":
                same(schedule, FLAT)
                same(make("all_reduce", "hierarchical", p), network)
    assert fewer > 20


def same(schedule: CommSchedule, network: Network) -> bool:
    """Compare with the full expansion; say whether fewer ranks were run."""
    for nbytes in (8.0, 1e8):
        few, full = (
            simulate(schedule, nbytes, network),
            simulate(schedule, nbytes, network, None, True),
        )
        place = (schedule.name, schedule.ranks, network, nbytes)
        assert few.makespan == pytest.approx(full.makespan, rel=1e-9), place
        assert few.messages == full.messages, place
        assert few.bytes_sent == pytest.approx(full.bytes_sent, rel=1e-9), place
        assert few.bytes_sent_max == pytest.approx(full.bytes_sent_max, rel=1e-9), place
        assert sum(count for _, count in few.classes) == schedule.ranks
        if len(few.classes) == schedule.ranks:
            return False
        assert schedule.symmetry is not None
        symmetry = schedule.symmetry(network.layout(schedule.ranks))
        assert symmetry is not None
        for rank in range(schedule.ranks):
            representative, itself = symmetry.view(rank, rank)
            assert representative == itself
            assert few.finish[representative] == pytest.approx(full.finish[rank], rel=1e-9), place
    return True


def test_segments_keep_the_classes() -> None:
    for name in ("ring", "halving_doubling", "hierarchical"):
        assert same(segment(make("all_reduce", name, 12), 3), FLAT)


def test_classes_are_few() -> None:
    counts = {"ring": 1, "halving_doubling": 9, "recursive_doubling": 9, "direct": 1}
    for name, most in counts.items():
        schedule = make("all_reduce", name, 100_000)
        assert schedule.symmetry is not None
        symmetry = schedule.symmetry((1,) * 100_000)
        assert symmetry is not None
        assert len(symmetry.classes) <= most


def test_100_000_ranks() -> None:
    p, n = 100_000, 2.0**26
    ring = simulate(make("all_reduce", "ring", p), n, FLAT, spans=0)
    assert ring.makespan == pytest.approx(2 * (p - 1) * A + (p - 1) / p * n * (2 * B + G), rel=1e-9)
    assert ring.messages == 2 * p * (p - 1)
    halves = simulate(make("all_reduce", "halving_doubling", p), n, FLAT, spans=0)
    size = 2**16
    exchanges = 2 * 16 * A + (size - 1) / size * n * (2 * B + G)
    assert halves.makespan == pytest.approx(exchanges + 2 * A + 2 * n * B + n * G, rel=1e-9)
    levels = simulate(make("all_reduce", "hierarchical", p), n, FLAT, spans=0)
    assert ring.makespan > halves.makespan > levels.makespan
    assert len(levels.timeline.spans) == 0


def test_two_levels() -> None:
    n, network = 1e6, Network(**LEVELS, nodes=2)
    inside = LEVELS["alpha_intra"] + n * LEVELS["beta_intra"] + n * G
    for shared, links in ((False, 1), (True, 2)):
        network = Network(**LEVELS, nodes=2, shared=shared)
        result = simulate(make("all_reduce", "recursive_doubling", 4), n, network)
        assert result.makespan == close(inside + A + links * n * B + n * G)


def test_a_link_is_shared_by_the_ranks_that_use_it() -> None:
    ring = make("all_gather", "ring", 6)  # only the last rank of a node sends to the next node
    network = Network(**LEVELS, nodes=3)
    alone = simulate(ring, 1e6, network).makespan
    assert simulate(ring, 1e6, Network(**LEVELS, nodes=3, shared=True)).makespan > alone


def test_additions_hide_behind_what_does_not_need_them() -> None:
    one = 1e6  # bytes of a chunk
    exchange = A + one * B
    late = written("0>1 0+1 | 0>1\n0>0 0+0 | 0<0")
    assert simulate(late, one, FLAT).makespan == close(exchange + one * G + exchange)
    free = written("0>1 0+1 | 1>1\n0>0 0+0 | 1<0", chunks=2)
    assert simulate(free, 2 * one, FLAT).makespan == close(exchange + max(one * G, exchange))


def test_segments_hide_additions() -> None:
    ring = make("all_reduce", "ring", 8)
    whole = simulate(ring, 1e9, FLAT).makespan
    assert simulate(segment(ring, 8), 1e9, FLAT).makespan < 0.85 * whole


def test_a_rank_takes_in_one_message_at_a_time() -> None:
    n = 1e6
    both = written("0+1 0+2\n0>0\n0>0")
    assert simulate(both, n, FLAT).makespan == close(A + 2 * n * B + 2 * n * G)
    assert simulate(written("0>1 0>2\n0<0\n0<0"), n, FLAT).makespan == close(2 * (A + n * B))


def test_sizes_of_chunks() -> None:
    ring = make("all_gather", "ring", 3)
    result = simulate(ring, 0, FLAT, sizes=[10, 0, 5])
    assert result.bytes_sent == 30
    assert result.bytes_sent_max == 15
    assert len(result.classes) == 3
    with pytest.raises(ConfigError, match=r"len\(sizes\)=2: all_gather/ring has 3 chunks"):
        simulate(ring, 0, FLAT, sizes=[10, 0])


def test_chunk_bytes() -> None:
    for name, p, expected in [
        ("all_reduce/ring", 4, 25), ("all_gather/ring", 4, 25), ("all_to_all/pairwise", 4, 25),
        ("broadcast/tree", 4, 100), ("shift/ring", 4, 100), ("barrier/dissemination", 4, 0),
        ("scatter/tree", 5, 20), ("all_reduce/recursive_doubling", 4, 100),
    ]:  # fmt: skip
        schedule = make(*name.split("/"), p)
        assert chunk_bytes(schedule, 100) == expected
        assert chunk_bytes(segment(schedule, 2), 100) == expected / 2


def test_bus_bandwidth() -> None:
    assert bus_bandwidth("all_reduce", 8e9, 4, 2.0) == 6e9
    assert bus_bandwidth("all_to_all", 8e9, 4, 2.0) == 3e9
    assert bus_bandwidth("broadcast", 8e9, 4, 2.0) == 4e9
    assert bus_bandwidth("barrier", 8e9, 4, 2.0) == 0
    assert bus_bandwidth("all_reduce", 8e9, 1, 0.0) == 0


def test_the_timeline() -> None:
    n, p = 1e6, 4
    result = simulate(make("all_reduce", "ring", p), n, FLAT, full=True)
    timeline = result.timeline
    assert timeline.ranks() == [0, 1, 2, 3]
    assert timeline.makespan == close(result.makespan)
    assert timeline.busy(2, "send") == close(2 * (p - 1) * (A + n / p * B))
    assert timeline.busy(2, "recv") == close(2 * (p - 1) * n / p * B)
    assert timeline.busy(2, "reduce") == close((p - 1) * n / p * G)
    sends = [span for span in timeline.of(1) if span.kind == "send"]
    assert {(span.peer, span.bytes) for span in sends} == {(2, 250_000)}
    for name in ("ring", "direct"):
        kept = simulate(make("all_reduce", name, p), n, FLAT, spans=5).timeline.spans
        assert len(kept) == 5


def test_counts() -> None:
    result = simulate(make("all_reduce", "ring", 5), 1000, FLAT)
    assert result.messages == 40
    assert result.bytes_sent == close(2 * 4 * 1000)
    assert result.bytes_sent_max == close(2 * 4 / 5 * 1000)


def test_a_message_that_never_comes() -> None:
    with pytest.raises(ScheduleError, match=r"rank 1 waits in its round 1 .* rank 0 never sends"):
        simulate(written("0>1\n0<0 | 0<0"), 8, FLAT)


def test_too_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScheduleError, match=r"p=100000: broadcast/scatter_all_gather takes more"):
        simulate(make("broadcast", "scatter_all_gather", 100_000), 8)
    monkeypatch.setattr(sys.modules["mpipar.schedule.simulate"], "OPERATIONS", 100)
    with pytest.raises(ScheduleError, match="more than 100 operations on 16 simulated ranks"):
        simulate(make("all_gather", "ring", 16), 8, full=True)


def test_networks() -> None:
    assert Network().layout(3) == (1, 1, 1)
    assert Network(nodes=4).layout(10) == (4, 4, 2)
    assert Network(nodes=(1, 3)).layout(4) == (1, 3)
    for nodes in (0, -1, (2, 2), (5, 0)):
        with pytest.raises(ConfigError, match="nodes="):
            Network(nodes=nodes).layout(5)
    for name in ("alpha", "beta_intra", "gamma"):
        for value in (-1e-9, float("nan")):
            with pytest.raises(ConfigError, match=f"{name}="):
                Network(**{name: value})
