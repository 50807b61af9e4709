"""Runs of a block are where its elements lie in the global array; checksums add up."""

from itertools import product
from math import prod

import numpy as np
import pytest
from safetensors.numpy import load_file

from mpipar.checkpoint.checksum import BLOCK, Sums, of_block, weights
from mpipar.checkpoint.format import Place, lay_out, parse
from mpipar.checkpoint.layout import Runs, runs_of
from mpipar.errors import CheckpointError
from mpipar.nn.spec import Spec


def spread(runs: Runs) -> np.ndarray:
    """The global index of every local element."""
    parts = [np.arange(w, w + n) for w, n in zip(runs.where, runs.length, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def specs() -> list[Spec]:
    """Blocks of uneven cuts, along several dimensions, by parts, and flat ones."""
    found = []
    for shape in ((), (7,), (5, 6), (6, 5), (4, 3, 5), (1, 9), (3, 0)):
        whole = Spec.replicated("w", shape)
        found.append(whole)
        for dim, (rank, size) in product(range(len(shape)), ((0, 2), (1, 2), (2, 3))):
            cut = whole.shard("tp", dim, rank, size)
            found.append(cut)
            found += [cut.shard("ep", d, 1, 2) for d in range(len(shape))]
            count = prod(cut.block_shape)
            found.append(cut.flatten("dp", count // 3, count - count // 4))
    fused = Spec.replicated("qkv", (8, 3)).shard("tp", 0, 1, 2, parts=(4, 2, 2))
    return [*found, fused, fused.flatten("dp", 2, 11), fused.shard("dp", 1, 0, 2)]


@pytest.mark.parametrize("spec", specs(), ids=str)
def test_runs_are_where_the_elements_lie(spec: Spec) -> None:
    runs = runs_of(spec)
    expected = spec.global_index().reshape(-1)
    assert np.array_equal(spread(runs), expected)
    assert np.array_equal(np.diff(runs.local), runs.length[:-1])
    for low, high in ((0, len(expected)), (1, 3), (2, 2), (0, 1)):
        if high <= len(expected):
            assert np.array_equal(spread(runs.part(low, high)), expected[low:high])


def test_whole_rows_are_one_run() -> None:
    whole = Spec.replicated("w", (8, 6, 4))
    assert len(runs_of(whole).where) == len(runs_of(whole.shard("tp", 0, 1, 3)).where) == 1
    assert len(runs_of(whole.shard("tp", 1, 1, 3)).where) == 8


@pytest.mark.parametrize("unit", [1, 2, 4, 64, 8192])
def test_sums_of_ranks_add_up_to_those_of_the_file(unit: int) -> None:
    rng = np.random.default_rng(unit)
    data = rng.integers(0, 256, 2 * BLOCK + 40003, dtype=np.uint8)
    edges = np.unique([0, len(data), *(rng.integers(0, len(data) // unit, 200) * unit)])
    where, length = edges[:-1], np.diff(edges)
    owner = rng.integers(0, 3, len(where))
    total = np.zeros(3, np.uint64)
    for rank in range(3):
        mine = owner == rank
        parts = [data[w : w + n] for w, n in zip(where[mine], length[mine], strict=True)]
        sums = Sums(len(data))
        sums.add(np.concatenate(parts), where[mine], length[mine])
        total += sums.values
    assert total.tolist() == [of_block(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def test_sums_of_columns() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 256, (3000, 4096), dtype=np.uint8)  # three blocks, at an odd place
    head = 4096 + 8
    total = np.zeros(-(-(matrix.size + head) // BLOCK), np.uint64)
    for low, high in ((0, 1024), (1024, 1028), (1028, 4096)):
        sums = Sums(matrix.size + head)
        where = np.arange(3000) * 4096 + low + head
        sums.add(matrix[:, low:high].reshape(-1), where, np.full(3000, high - low))
        total += sums.values
    data = np.concatenate([np.zeros(head, np.uint8), matrix.reshape(-1)])
    assert total.tolist() == [of_block(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def test_a_sum_is_that_of_words_times_weights() -> None:
    data = np.arange(11, dtype=np.uint8)
    words = np.append(data, np.uint8(0)).view("<u4").tolist()
    exact = sum(word * weight for word, weight in zip(words, weights()[:3].tolist(), strict=True))
    assert of_block(data) == exact % 2**64
    assert (weights() % 2 == 1).all()
    for at in range(11):  # an error in a single byte never goes unseen
        wrong = data.copy()
        wrong[at] ^= 128
        assert of_block(wrong) != exact % 2**64


def test_a_head_is_that_of_a_safetensors_file(tmp_path: object) -> None:
    places = [
        Place("b", np.dtype(np.float32), (3, 2)),
        Place("a", np.dtype(np.float16), (5,)),
        Place("c", np.dtype(np.int64), (1,)),
        Place("none", np.dtype(np.float32), (0, 4)),
    ]
    head = lay_out(places)
    assert [place.name for place in head.places] == ["c", "b", "none", "a"]
    assert head.places[0].start % 4096 == 0
    path = f"{tmp_path}/x.safetensors"
    body = np.arange(head.nbytes - len(head.text), dtype=np.uint8).tobytes()
    with open(path, "wb") as file:
        file.write(head.text + body)
    for name, array in load_file(path).items():
        place = next(p for p in head.places if p.name == name)
        begin = place.start - len(head.text)
        assert (array.dtype, array.shape) == (place.dtype, place.shape)
        assert array.tobytes() == body[begin : begin + place.nbytes]
    assert parse(head.text, path) == head
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        parse(b"12345678{}]", path)
