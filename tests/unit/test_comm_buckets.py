"""How arrays are laid out in buckets, and when a bucket starts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpipar.arrays import dtype
from mpipar.comm.buckets import Bucket, Buckets, Item, check_settings, cut
from mpipar.errors import ConfigError

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def items(*sizes: int, kind: np.dtype = F32) -> list[Item]:
    return [Item((size,), kind, "cpu") for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        ([4, 4, 4, 4], 32, [[0, 1], [2, 3]]),
        ([8, 8], 32, [[0], [1]]),  # exactly one bucket each
        ([8, 0, 8], 32, [[0, 1], [2]]),  # nothing needs no room
        ([9, 1, 7], 32, [[0], [1, 2]]),  # one that is larger than a bucket
        ([1, 0, 2], 1e-3, [[0], [1], [2]]),
        ([0, 0], 1e-3, [[0, 1]]),
        ([], 32, []),
    ],
)
def test_a_bucket_is_never_overfull(
    sizes: list[int], capacity: float, expected: list[list[int]]
) -> None:
    assert cut(items(*sizes), range(len(sizes)), capacity) == expected


def test_the_order_is_the_given_one() -> None:
    assert cut(items(4, 4, 4, 4), [3, 1, 0, 2], 32) == [[3, 1], [0, 2]]


def test_dtypes_have_buckets_of_their_own() -> None:
    mixed = [*items(1, 1), *items(1, kind=F64), *items(1, 1)]
    assert cut(mixed, range(5), 1e6) == [[2], [0, 1, 3, 4]]  # by their last items


def test_views_share_the_buffer() -> None:
    shapes = [(2, 3), (), (0, 4), (5,)]
    bucket = Bucket([2, 0, 3, 1], [Item(shape, F64, "cpu") for shape in shapes], None)
    assert [bucket.views[i].shape for i in range(4)] == shapes
    for number, view in bucket.views.items():
        view[...] = number
    np.testing.assert_array_equal(bucket.buffer, [0] * 6 + [3] * 5 + [1])
    assert bucket.outgoing() is bucket.buffer
    bucket.incoming(4)
    np.testing.assert_array_equal(bucket.views[3], np.full(5, 0.75))


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_narrow_on_the_wire(wire: str) -> None:
    bucket = Bucket([0], items(3), dtype(wire))
    bucket.buffer[:] = 1 / 3, 1.0, -2.0
    sent = bucket.outgoing()
    assert sent.dtype == dtype(wire)
    bucket.incoming(1)
    np.testing.assert_array_equal(bucket.buffer, sent.astype(F32))
    assert Bucket([0], items(3, kind=dtype(wire)), dtype(wire)).outgoing().dtype == dtype(wire)


def test_sixteen_bit_sums_are_divided_in_float32() -> None:
    bucket = Bucket([0], items(2, kind=dtype("bfloat16")), None)
    bucket.buffer[:] = [10, 3]
    bucket.incoming(3)
    np.testing.assert_array_equal(bucket.buffer, np.float32([10 / 3, 1]).astype(dtype("bfloat16")))


def test_buckets_start_in_order() -> None:
    started: list[list[int]] = []
    buckets = Buckets(items(1, 1, 0, 1), [3, 1, 2, 0], 4, None, lambda b: started.append(b.numbers))
    buckets.bucket_of[1].missing -= 2
    buckets.start_complete()
    assert started == []
    buckets.bucket_of[3].missing -= 1
    buckets.start_complete()
    assert started == [[3], [1, 2]]
    buckets.finish(lambda b: 1.0)
    assert started == [[3], [1, 2], [0]]
    assert buckets.all_started
    buckets.reset()
    assert not buckets.all_started


@pytest.mark.parametrize(
    "wrong",
    [{"bucket_mb": 0}, {"bucket_mb": float("nan")}, {"op": "max"}, {"steps": 0},
     {"wire_dtype": "float32"}],
)  # fmt: skip
def test_settings_that_cannot_work(wrong: dict) -> None:
    good = {"bucket_mb": 1e-9, "op": "sum", "steps": 1, "wire_dtype": None}
    check_settings(**good)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        check_settings(**{**good, **wrong})


def test_in_shared_memory_the_first_step_waits_for_all() -> None:
    class Memory:
        """Of one process: places are arrays."""

        def clear(self) -> None:
            pass

        def place(self, n: int, dtype: np.dtype) -> SimpleNamespace:
            return SimpleNamespace(buffer=np.zeros(n, dtype), result=np.ones(n, dtype))

    started: list[list[int]] = []
    memory: Any = Memory()
    buckets = Buckets(items(1, 1), [0, 1], 4, None, lambda b: started.append(b.numbers), memory)
    for step in range(2):
        buckets.bucket_of[0].missing -= 1
        buckets.start_complete()
        assert started == ([[0]] if step else [])
        buckets.finish(lambda b: 1.0)
        assert started == [[0], [1]]
        assert (buckets.bucket_of[0].results[0] == 1).all()
        buckets.reset()
        started.clear()
