"""The ground that every layer stands on: splits, random numbers, dtypes, timelines, error texts."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipar import arrays, errors, partition, rng
from mpipar.trace import Span, Timeline


@given(st.integers(0, 100), st.integers(1, 20))
def test_blocks_are_those_of_numpy(n, p):
    parts = np.array_split(np.arange(n), p)
    sizes = partition.blocks(n, p)
    assert sizes == tuple(map(len, parts))
    assert all((np.arange(n)[partition.block(n, p, r)] == parts[r]).all() for r in range(p))
    assert partition.offsets(sizes) == tuple(np.cumsum([0, *sizes[:-1]]))
    size, total = partition.padded_blocks(n, p)
    assert total == size * p
    assert n <= total < n + p


@given(st.integers(0, 100), st.integers(1, 8))
def test_zigzag_covers_all_positions_once(n, p):
    held = [np.r_[first, second] for first, second in partition.zigzag(n, p)]
    assert sorted(np.concatenate(held)) == list(range(n))
    assert all((np.diff(positions) > 0).all() for positions in held)


def test_zigzag_shares_causal_work_evenly():
    work = [sum(np.r_[a, b] + 1) for a, b in partition.zigzag(64, 4)]  # keys that each query sees
    assert len(set(work)) == 1


@pytest.mark.parametrize(("n", "p", "name"), [(-1, 2, "n=-1"), (3, 0, "p=0")])
def test_splits_that_cannot_be(n, p, name):
    with pytest.raises(errors.ConfigError, match=name):
        partition.blocks(n, p)


def test_random_numbers_are_the_same_everywhere():
    """Pinned: weights of a seed must not change with the version, the machine or the process."""
    key = rng.key(1, "blocks.0.weight")
    assert key == 0x40F5E95D829D1615
    bits = rng.bits(key, np.arange(2, dtype=np.uint64)).tolist()
    assert bits == [0x372614CB039598E6, 0xB891DB3DE2F7B034]  # SplitMix64 in Python's integers
    code = "from mpipar import rng; print(rng.key(1, 'blocks.0.weight'))"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(again.stdout) == key


def test_keys_differ_by_seed_and_by_every_name():
    keys = [rng.key(1, "a"), rng.key(2, "a"), rng.key(1, "b"), rng.key(1, "a", 0), rng.key(1, "a0")]
    assert len(set(keys)) == len(keys)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_a_block_draws_what_the_whole_has_there(shape, data):
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    local = [
        data.draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)
    ]
    index = rng.indices(shape, offset, local)
    cut = tuple(slice(start, start + size) for start, size in zip(offset, local, strict=True))
    assert (index == np.arange(np.prod(shape)).reshape(shape)[cut]).all()
    whole = rng.normal(7, rng.indices(shape, [0] * len(shape), shape))
    assert (rng.normal(7, index) == whole[cut]).all()


def test_the_numbers_are_distributed_as_they_say():
    index = np.arange(200_000, dtype=np.uint64)
    uniform, normal = rng.uniform(3, index), rng.normal(3, index)
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 / np.sqrt(12 * len(index))  # five standard errors
    assert abs(normal.mean()) < 5 / np.sqrt(len(index))
    assert abs(normal.var() - 1) < 5 * np.sqrt(2 / len(index))
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 5 / np.sqrt(len(index))


def test_the_position_comes_back():
    before = rng.position()
    with rng.at(step=3, row=8):
        assert (rng.position().step, rng.position().row) == (3, 8)
        with pytest.raises(KeyError), rng.at(step=4, row=0):
            raise KeyError
        assert rng.position().step == 3
    assert rng.position() == before


def test_dtypes_and_what_sums_are_taken_in():
    assert arrays.dtype("bfloat16") == ml_dtypes.bfloat16
    assert arrays.dtype(np.float32) == np.float32
    for name in ("float16", "bfloat16"):
        assert arrays.is_sixteen_bit(arrays.dtype(name))
        assert arrays.compute_dtype(arrays.dtype(name)) == np.float32
    for name in ("int16", "float32", "float64"):
        assert not arrays.is_sixteen_bit(arrays.dtype(name))
        assert arrays.compute_dtype(arrays.dtype(name)) == name


def test_a_device_that_is_not_there(monkeypatch):
    assert arrays.module("cpu") is np
    assert arrays.module_of(np.zeros(2)) is np
    with pytest.raises(errors.ConfigError, match="device='tpu'"):
        arrays.module("tpu")
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(errors.ConfigError, match="pip install"):
        arrays.module("cuda")


def test_a_timeline():
    line = Timeline()
    assert (line.makespan, line.ranks()) == (0.0, [])
    line.add(Span(1, "a", "send", 0.0, 2.0, peer=0, bytes=8))
    line.extend([Span(1, "b", "compute", 2.0, 5.0), Span(0, "a", "recv", 0.5, 2.0)])
    assert line.makespan == 5.0
    assert line.ranks() == [0, 1]
    assert [span.name for span in line.of(1)] == ["a", "b"]
    assert (line.busy(1), line.busy(1, "send")) == (5.0, 2.0)


def test_errors_are_what_a_reader_expects():
    text = errors.explain("tp", 3, "it divides the 4 ranks", "Choose 1, 2 or 4")
    assert text == "tp=3: it divides the 4 ranks. Choose 1, 2 or 4"
    for kind, base in [
        (errors.ConfigError, ValueError),
        (errors.MismatchError, ValueError),
        (errors.DtypeMismatchError, TypeError),
        (errors.CollectiveTimeoutError, TimeoutError),
    ]:
        assert issubclass(kind, base)
        assert issubclass(kind, errors.MpiparError)
