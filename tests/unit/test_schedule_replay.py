"""Every algorithm in replay, against NumPy on the same numbers."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.errors import BufferMismatchError, ScheduleError
from mpipar.partition import blocks, offsets
from mpipar.schedule import generators, make, replay, segment

NAMES = [f"{c}/{a}" for c, of in generators.items() for a in of]
ALL_REDUCES = list(generators["all_reduce"])
ORDERED = [f"{c}/{a}" for c, of in generators.items() for a, g in of.items() if g.ordered]


def inputs_of(schedule, sizes, seed=0):
    """Draw whole numbers (sums are exact) for the blocks that each rank starts with."""
    rng = np.random.default_rng(seed)
    held = [schedule.initial(rank)[:: schedule.parts] for rank in range(schedule.ranks)]
    counts = [sum(sizes[chunk // schedule.parts] for chunk in chunks) for chunks in held]
    return [rng.integers(-50, 50, n).astype(float) for n in counts]


def cut(x, sizes):
    return [x[start : start + size] for start, size in zip(offsets(sizes), sizes, strict=True)]


def expected(schedule, inputs, sizes):
    """Return what each rank should end with; None where it ends with nothing."""
    p, root, name = schedule.ranks, schedule.root, schedule.collective
    on_root = [None] * p
    match name:
        case "all_reduce":
            return [sum(inputs)] * p
        case "reduce_scatter":
            return cut(sum(inputs), sizes)
        case "all_gather" | "barrier":
            return [np.concatenate(inputs)] * p
        case "all_to_all":
            parts = [cut(inputs[i], sizes[i * p : i * p + p]) for i in range(p)]
            return [np.concatenate([parts[i][j] for i in range(p)]) for j in range(p)]
        case "broadcast":
            return [inputs[root]] * p
        case "reduce":
            on_root[root] = sum(inputs)
        case "gather":
            on_root[root] = np.concatenate(inputs)
        case "scatter":
            return cut(inputs[root], sizes)
        case "shift":
            return [inputs[(rank - schedule.offset) % p] for rank in range(p)]
    return on_root


def check(schedule, sizes, seed=0):
    inputs = inputs_of(schedule, sizes, seed)
    before = [x.copy() for x in inputs]
    for got, want in zip(
        replay(schedule, inputs, sizes=sizes), expected(schedule, inputs, sizes), strict=True
    ):
        if want is None:
            assert got is None
        else:
            np.testing.assert_array_equal(got, want)
    for x, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, old)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 13])
def test_any_number_of_elements_on_1_to_8_and_13_ranks(name, n):
    for p in (*range(1, 9), 13):
        schedule = make(*name.split("/"), p, root=p - 1, offset=2)
        per_vector = schedule.blocks // p if schedule.collective == "all_to_all" else 1
        sizes = blocks(n, schedule.blocks // per_vector) * per_vector
        check(schedule, sizes)
        check(segment(schedule, 3), sizes)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_uneven_blocks(name, data):
    p = data.draw(st.integers(1, 9))
    options = {"root": data.draw(st.integers(0, p - 1)), "offset": data.draw(st.integers(-9, 9))}
    schedule = make(*name.split("/"), p, **options)
    k = data.draw(st.integers(1, 3))
    size = st.integers(0, 4)
    sizes = data.draw(st.lists(size, min_size=schedule.blocks, max_size=schedule.blocks))
    check(segment(schedule, k), sizes, seed=k)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(nodes=st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple), n=st.integers(0, 40))
def test_hierarchical_on_any_nodes(nodes, n):
    schedule = make("all_reduce", "hierarchical", sum(nodes), nodes=nodes)
    check(schedule, blocks(n, schedule.blocks))


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8, 11])
def test_a_non_commutative_operation_keeps_rank_order(name, p):
    """Joining words is not commutative: every result must be the words in rank order."""
    for root in {0, p // 2, p - 1}:
        schedule = make(*name.split("/"), p, root=root)
        words = [[f"{rank}:{block} " for block in range(schedule.blocks)] for rank in range(p)]
        results = replay(schedule, words, op=lambda a, b: a + b)
        for rank, result in enumerate(results):
            wanted = ["".join(words[r][block] for r in range(p)) for block in schedule.final(rank)]
            assert (result or []) == wanted


def test_matrix_products_in_rank_order():
    rng = np.random.default_rng(1)
    matrices = [rng.standard_normal((3, 3)) for _ in range(6)]
    want = np.linalg.multi_dot(matrices)
    for algorithm in ("tree", "recursive_doubling"):
        for got in replay(make("all_reduce", algorithm, 6), [[m] for m in matrices], op=np.matmul):
            np.testing.assert_allclose(got[0], want, rtol=1e-12)


@pytest.mark.parametrize("op", [np.maximum, np.minimum, np.multiply])
def test_other_operations(op):
    rng = np.random.default_rng(2)
    inputs = [rng.integers(1, 9, 11) for _ in range(5)]
    for algorithm in ALL_REDUCES:
        for got in replay(make("all_reduce", algorithm, 5), inputs, op=op):
            np.testing.assert_array_equal(got, op.reduce(inputs))


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_cancelling_numbers_give_the_same_bytes_on_all_ranks(algorithm):
    inputs = [np.full(5, x) for x in (1e16, 1.0, -1e16, 1.0)]
    results = replay(make("all_reduce", algorithm, 4), inputs)
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_direct_adds_from_rank_0_on(parts):
    """((1e16 + 1) - 1e16) + 1 is 1 in float64; another order gives 0 or 2."""
    schedule = segment(make("all_reduce", "direct", 4), parts)
    inputs = [np.full(5, x) for x in (1e16, 1.0, -1e16, 1.0)]
    for result in replay(schedule, inputs):
        np.testing.assert_array_equal(result, np.ones(5))
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(33) for _ in range(4)]
    want = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    for result in replay(schedule, inputs):
        assert result.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_16_bit_sums_are_float32_inside_and_rounded_once(dtype, p):
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal(29).astype(dtype) for _ in range(p)]
    want = inputs[0].astype(np.float32)
    for x in inputs[1:]:
        want = want + x.astype(np.float32)
    for result in replay(make("all_reduce", "direct", p), inputs):
        assert result.dtype == dtype
        assert result.tobytes() == want.astype(dtype).tobytes()


def test_16_bit_sums_do_not_overflow_on_the_way():
    inputs = [np.full(4, x, np.float16) for x in (60000, 60000, -60000, -40000)]
    for result in replay(make("all_reduce", "direct", 4), inputs):
        np.testing.assert_array_equal(result, np.full(4, 20000, np.float16))


def test_lists_of_blocks_give_lists_of_blocks():
    schedule = make("all_gather", "ring", 3)
    blocks_in = [[np.full((2, rank + 1), rank)] for rank in range(3)]
    for result in replay(segment(schedule, 2), blocks_in):
        assert [block.shape for block in result] == [(2, 1), (2, 2), (2, 3)]
    assert replay(make("gather", "linear", 2), [[np.ones(1)], [np.zeros(1)]])[1] is None


def test_none_stands_for_a_rank_that_brings_nothing():
    results = replay(make("scatter", "tree", 3, root=1), [None, np.arange(7), None])
    assert [result.tolist() for result in results] == [[0, 1, 2], [3, 4], [5, 6]]


def test_lists_of_numbers_are_vectors():
    results = replay(make("all_reduce", "ring", 2), [[1.0, 2.0, 3.0], [4, 5, 6]])
    assert results[1].tolist() == [5.0, 7.0, 9.0]


def test_inputs_that_do_not_fit():
    schedule = make("all_reduce", "tree", 2)
    with pytest.raises(BufferMismatchError, match=r"len\(inputs\)=1"):
        replay(schedule, [np.ones(3)])
    with pytest.raises(BufferMismatchError, match=r"shapes=\[\(3,\), \(1,\)\]"):
        replay(schedule, [np.ones(3), np.ones(1)])
    with pytest.raises(BufferMismatchError, match=r"size=3: rank 0 .* \[4\]"):
        replay(schedule, [np.ones(3), np.ones(3)], sizes=[4])
    with pytest.raises(BufferMismatchError, match=r"blocks=0: rank 0 starts with 1"):
        replay(schedule, [None, np.ones(3)])


def test_a_wrong_schedule_is_no_oracle():
    schedule = make("all_reduce", "tree", 3)
    cut_short = schedule.with_rounds(lambda rank: iter(list(schedule.rounds(rank))[:-1]))
    with pytest.raises(ScheduleError, match="waits"):
        replay(cut_short, [np.ones(2)] * 3)
