"""Where parameters lie in a flat unit: the blocks of all ranks tile it, padding aside."""

from dataclasses import asdict
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import ConfigError
from mpipar.nn.spec import Spec
from mpipar.parallel.fsdp.config import FsdpConfig
from mpipar.parallel.fsdp.layout import Layout

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=5)


def test_the_picture_of_the_module():
    layout = Layout([(5,), (3, 2), (3,)], np.dtype("float64"), 4)
    (segment,) = layout.segments
    assert segment.sizes == (4, 4, 4, 4)
    assert segment.padding == slice(14, 16)
    held = [
        [(s.start, s.stop, s.offset) for s in (layout.share(n, r) for n in range(3))]
        for r in range(4)
    ]
    assert held[1][:2] == [(4, 5, 0), (0, 3, 1)]
    assert held[3][2][:2] == (1, 3)
    assert all(held[0][n][0] == held[0][n][1] for n in (1, 2))
    rows = Layout([(5,), (3, 2), (3,)], np.dtype("float64"), 4, flatten=False)
    assert [s.sizes for s in rows.segments] == [(2, 1, 1, 1), (2, 2, 2, 0), (1, 1, 1, 0)]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(SHAPES, st.integers(1, 5), st.booleans(), st.sampled_from([1e-6, 8 * 12 / 2**20, 25]))
def test_shards_tile_the_unit(shapes, ranks, flatten, bucket_mb):
    layout = Layout(shapes, np.dtype("float64"), ranks, flatten, bucket_mb)
    whole = np.full(layout.total, -1.0)
    for number, place in enumerate(layout.places):
        whole[place] = 100 * number + np.arange(prod(shapes[number]))
    shards = []
    for rank in range(ranks):
        pieces = [whole[segment.block(rank)] for segment in layout.segments]
        shards.append(np.concatenate([*pieces, np.zeros(0)]))
        assert shards[-1].size == layout.shard_size(rank)
    assert sum(shard.size for shard in shards) == layout.total
    for number, shape in enumerate(shapes):
        seen = []
        for rank, shard in enumerate(shards):
            share = layout.share(number, rank)
            values = shard[share.offset :][: share.stop - share.start]
            np.testing.assert_array_equal(values, whole[share.where])
            np.testing.assert_array_equal(values - 100 * number, np.arange(share.start, share.stop))
            seen += (values - 100 * number).tolist()
        assert seen == list(range(prod(shape)))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_flat_specs_take_put_and_number_their_elements(shape, tp, dp):
    whole = np.arange(prod(shape), dtype=np.uint64).reshape(shape)
    rebuilt = np.full(shape, 2**63, np.uint64)
    for block in (
        Spec.replicated("w", shape).shard("tp", len(shape) - 1, r, tp) for r in range(tp)
    ):
        layout = Layout([block.local_shape], np.dtype("float64"), dp)
        for rank in range(dp):
            share = layout.share(0, rank)
            spec = block.flatten("dp", share.start, share.stop)
            held = spec.take(whole)
            assert held.shape == spec.local_shape == (share.stop - share.start,)
            np.testing.assert_array_equal(held, spec.global_index())
            np.testing.assert_array_equal(held[1:3], spec.global_index(slice(1, 3)))
            spec.put(rebuilt, held)
    np.testing.assert_array_equal(rebuilt, whole)


def test_a_flat_spec_is_the_last_cut():
    spec = Spec.replicated("w", (3, 4)).flatten("dp", 4, 8, copies=2)
    assert spec.sharded_axes == ("dp",)
    assert spec.copies == 2
    assert spec.block == Spec.replicated("w", (3, 4))
    with pytest.raises(ConfigError, match="flat already"):
        spec.shard("tp", 0, 0, 2)
    with pytest.raises(ConfigError, match="12 elements"):
        Spec.replicated("w", (3, 4)).flatten("dp", 4, 13)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"sharding_strategy": "ZERO"}, "FULL_SHARD"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "shard_size"),
        ({"shard_size": 2}, "HYBRID_SHARD"),
        ({"min_param_size": -1}, "min_param_size"),
        ({"mixed_precision": "float8"}, "bfloat16"),
        ({"reduce_dtype": "float64"}, "float32"),
        ({"bucket_mb": 0}, "bucket_mb"),
    ],
)
def test_settings_that_cannot_work(wrong, named):
    with pytest.raises(ConfigError, match=named):
        FsdpConfig(**wrong)


def test_settings_are_plain_values():
    config = FsdpConfig(sharding_strategy="HYBRID_SHARD", shard_size=2, mixed_precision="bfloat16")
    assert FsdpConfig(**asdict(config)) == config
    with pytest.raises(ConfigError, match="One of: 1, 3"):
        config.shard_ranks(3)
