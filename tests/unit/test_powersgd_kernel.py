"""The arithmetic of low-rank factors, against NumPy in float64."""

import numpy as np
import pytest

from mpipar.kernels import low_rank


def rows(r: int, n: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((r, n)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("r", "n"), [(1, 1), (1, 5), (3, 3), (4, 1000), (32, 64)])
def test_rows_become_orthonormal_and_span_the_same(r: int, n: int, dtype: str) -> None:
    given = rows(r, n, dtype)
    made = given.copy()
    assert low_rank.orthonormalise(made) == []
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(made @ made.T, np.eye(r), atol=20 * eps)
    wide = made.astype(np.float64)
    np.testing.assert_allclose(given @ wide.T @ wide, given, atol=200 * eps)


def test_nearly_dependent_rows_are_orthonormal_too() -> None:
    given = rows(4, 200)
    given[1] = given[0] + 1e-9 * given[1]
    given[3] = given[0] + given[2] + 1e-9 * given[3]
    assert low_rank.orthonormalise(given) == []
    np.testing.assert_allclose(given @ given.T, np.eye(4), atol=1e-14)


def test_rows_that_others_span_become_zero() -> None:
    given = np.zeros((5, 8))
    given[1, 3], given[2, 3], given[4, 0] = 2.0, -7.0, 1e-30
    assert low_rank.orthonormalise(given) == [0, 2, 3]
    expected = np.zeros((5, 8))
    expected[1, 3] = expected[4, 0] = 1
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70_000), (700, 100), (70_000, 3)])
@pytest.mark.parametrize("r", [1, 4])
def test_products(r: int, shape: tuple[int, int]) -> None:
    n, m = shape
    left, right, given = rows(r, n), rows(r, m, seed=1), rows(n, m, seed=2)
    expected, out = low_rank.reference(left, right), np.empty(shape)
    low_rank.product(left, right, out)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-13)
    low_rank.subtract_product(left, right, given)
    np.testing.assert_allclose(given, rows(n, m, seed=2) - expected, rtol=1e-12, atol=1e-12)


def test_a_product_is_rounded_once() -> None:
    left, right = rows(4, 50, "float32"), rows(4, 60, "float32", seed=1)
    whole, half = np.empty((50, 60), "float32"), np.empty((50, 60), "float16")
    low_rank.product(left, right, whole)
    low_rank.product(left, right, half)
    np.testing.assert_array_equal(half, whole.astype("float16"))
