"""The shards of any spec tile the global array; random numbers follow the global index."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import BufferMismatchError, ConfigError
from mpipar.nn.init import draw
from mpipar.nn.spec import Partial, Replicate, Shard, Spec


@st.composite
def cuts(draw_from):
    """A shape, and a list of (dim, ranks, parts) by which it is cut in turn."""
    shape = draw_from(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    plan = []
    for _ in range(draw_from(st.integers(1, 3))):
        dim = draw_from(st.integers(0, len(shape) - 1))
        parts = None
        if all(dim != before for before, _, _ in plan) and draw_from(st.booleans()):
            marks = sorted(draw_from(st.lists(st.integers(0, shape[dim]), max_size=3)))
            edges = [0, *marks, shape[dim]]
            parts = tuple(b - a for a, b in pairwise(edges))
        plan.append((dim, draw_from(st.integers(1, 4)), parts))
    return tuple(shape), plan


def all_shards(shape, plan):
    specs = [Spec.replicated("w", shape)]
    for number, (dim, ranks, parts) in enumerate(plan):
        specs = [
            s.shard(f"axis{number}", dim, r, ranks, parts) for s in specs for r in range(ranks)
        ]
    return specs


@settings(deadline=None, max_examples=150, derandomize=True)
@given(cuts())
def test_shards_tile_the_global_array(case):
    shape, plan = case
    whole = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    rebuilt = np.full(shape, 2**63, np.uint64)
    count = np.zeros(shape, int)
    for spec in all_shards(shape, plan):
        block = spec.take(whole)
        assert block.shape == spec.local_shape
        np.testing.assert_array_equal(block, spec.global_index())
        for here, there in spec.boxes():
            np.testing.assert_array_equal(block[here], whole[there])
            count[there] += 1
        spec.put(rebuilt, block)
    np.testing.assert_array_equal(rebuilt, whole)
    assert (count == 1).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(cuts(), st.booleans())
def test_a_shard_draws_what_the_whole_has_there(case, normal):
    shape, plan = case
    how = {"std": 0.5} if normal else {"bound": 0.25}
    whole = draw(Spec.replicated("w", shape), 7, **how)
    for spec in all_shards(shape, plan):
        np.testing.assert_array_equal(draw(spec, 7, **how), spec.take(whole))


def test_each_part_of_a_fused_weight_is_cut_on_its_own():
    whole = Spec.replicated("qkv", (8, 3))
    first, second = (whole.shard("tp", 0, r, 2, parts=(4, 2, 2)) for r in range(2))
    assert first.pieces == (((0, 2), (4, 1), (6, 1)), ((0, 3),))
    assert second.pieces == (((2, 2), (5, 1), (7, 1)), ((0, 3),))
    assert second.local_shape == (4, 3)
    assert second.offset == (2, 0)
    assert second.size == (2, 3)
    assert second.placement("tp") == Shard(0, (4, 2, 2))


def test_uneven_and_empty_blocks():
    sizes = [Spec.replicated("w", (8,)).shard("dp", 0, r, 3).local_shape for r in range(3)]
    assert sizes == [(3,), (3,), (2,)]
    empty = Spec.replicated("w", (2, 5)).shard("dp", 0, 3, 4)
    assert empty.pieces[0] == ((2, 0),)
    assert empty.take(np.zeros((2, 5))).shape == (0, 5)
    assert draw(empty, 0, std=1.0).shape == (0, 5)


def test_one_rank_holds_everything_in_one_piece():
    spec = Spec.replicated("qkv", (8, 3)).shard("tp", 0, 0, 1, parts=(4, 2, 2))
    assert spec.pieces == Spec.replicated("qkv", (8, 3)).pieces
    assert spec.sharded_axes == ("tp",)


def test_placements_are_stated_once_and_absent_means_replicated():
    spec = Spec.replicated("w", (4,)).place("dp", Partial())
    assert spec.placement("dp") == Partial()
    assert spec.placement("tp") == Replicate()
    assert spec.sharded_axes == ()
    assert hash(spec) == hash(Spec("w", (4,), {"dp": Partial()}))
    with pytest.raises(ConfigError, match="must not have a placement"):
        spec.shard("dp", 0, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tp", 2, 0, 2), "one of the 2 dimensions"),
        (("tp", 0, 2, 2), "one of the 2 ranks"),
        (("tp", 0, 0, 2, (3, 2)), "add up to 8"),
        (("tp", 0, 0, 2, (9, -1)), "add up to 8"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Spec.replicated("w", (8, 3)).shard(*arguments)


def test_parts_of_a_dimension_that_is_already_cut_are_refused():
    with pytest.raises(ConfigError, match="must not be cut"):
        Spec.replicated("w", (8,)).shard("tp", 0, 1, 2).shard("dp", 0, 0, 2, parts=(4, 4))


def test_an_array_of_another_shape_is_refused():
    spec = Spec.replicated("w", (8, 3)).shard("tp", 0, 0, 2)
    with pytest.raises(BufferMismatchError, match=r"whole\.shape"):
        spec.take(np.zeros((4, 3)))
    with pytest.raises(BufferMismatchError, match=r"local\.shape"):
        spec.put(np.zeros((8, 3)), np.zeros((8, 3)))


def test_draw_has_the_moments_asked_for_and_rounds_once():
    spec = Spec.replicated("w", (300, 400))
    normal = draw(spec, 0, std=0.02, dtype="float64")
    assert abs(normal.mean()) < 2e-4
    assert abs(normal.std() - 0.02) < 2e-4
    uniform = draw(spec, 0, bound=0.5, dtype="float64")
    assert uniform.min() >= -0.5
    assert uniform.max() < 0.5
    assert abs(uniform.std() - 0.5 / 3**0.5) < 2e-3
    np.testing.assert_array_equal(draw(spec, 0, std=0.02), normal.astype(np.float32))
    assert not np.array_equal(draw(Spec.replicated("u", (300, 400)), 0, std=0.02), normal)
    assert not np.array_equal(draw(spec, 1, std=0.02, dtype="float64"), normal)
