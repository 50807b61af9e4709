"""The sum of several buffers, in the order of the operands, whatever blocks it is cut into."""

import ml_dtypes
import numpy as np
import pytest

from mpipar.kernels import reduce
from mpipar.kernels.reduce import COMBINE, fold

SIZES = [0, 1, 7, 1000, 4096]


def operands(k: int, n: int, dtype: str) -> list[np.ndarray]:
    draws = np.random.default_rng((k, n))
    return [(draws.standard_normal(n) * 10.0**i).astype(dtype) for i in range(k)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("op", COMBINE)
def test_in_order_in_any_blocks(monkeypatch: pytest.MonkeyPatch, op: str, dtype: str) -> None:
    for k in (1, 2, 3, 5):
        for n in SIZES:
            given = operands(k, n, dtype)
            divisor = k if op == "mean" and dtype != "int64" else 1
            expected = given[0]
            for operand in given[1:]:
                expected = COMBINE[op](expected, operand)
            expected = expected / np.array(divisor, dtype) if divisor != 1 else expected
            for nbytes in (64, 4096, 1 << 18):
                monkeypatch.setattr(reduce, "BLOCK_BYTES", nbytes)
                for where in range(-1, k):  # a new array, or one of the operands
                    own = [operand.copy() for operand in given]
                    out = own[where] if where >= 0 else np.empty(n, dtype)
                    fold(COMBINE[op], own, out, divisor)
                    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits_are_added_in_float32(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    monkeypatch.setattr(reduce, "BLOCK_BYTES", 128)
    given = [x.astype(dtype) for x in operands(4, 1000, "float32")]
    total = given[0].astype(np.float32)
    for operand in given[1:]:
        total = total + operand.astype(np.float32)
    out, wide = np.empty(1000, dtype), np.empty(1000, np.float32)
    fold(np.add, given, out, 3)
    np.testing.assert_array_equal(out, (total / np.float32(3)).astype(dtype))
    fold(np.add, given, wide)
    np.testing.assert_array_equal(wide, total)
    fold(np.add, [wide], out, 4)
    np.testing.assert_array_equal(out, (total / np.float32(4)).astype(dtype))
    fold(np.add, given, given[2])
    np.testing.assert_array_equal(given[2], total.astype(dtype))


@pytest.mark.parametrize("divisor", [2, 4.0, 3, 6.0, 0.5, 1024])
def test_a_power_of_two_divides_to_the_same_bits(divisor: float) -> None:
    draws = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        tiny = np.finfo(dtype).smallest_subnormal * np.arange(50).astype(dtype)
        x = np.concatenate([draws.standard_normal(500).astype(dtype), tiny, [np.inf, -0.0]])
        x = x.astype(dtype)
        out = np.empty_like(x)
        fold(np.add, [x], out, divisor)
        assert out.tobytes() == (x / dtype(divisor)).tobytes()
