"""Products of host matrices by MKL's way: how operands lie in memory, sums and biases.

Where MKL is not installed, NumPy's own BLAS, which has the same functions under other names, stands
in for it.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpipar.kernels.matmul import blas

KINDS: dict[type, str] = {np.float32: "scipy_cblas_sgemm64_", np.float64: "scipy_cblas_dgemm64_"}


def stand_in() -> dict[np.dtype, Any]:
    """Return the functions of NumPy's OpenBLAS, or nothing if its wheel has another BLAS."""
    for file in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64*"):
        library = ctypes.CDLL(str(file))
        return {np.dtype(k): blas.declared(library[name], k) for k, name in KINDS.items()}
    return {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let products go by MKL or what stands in for it, and list the calls."""
    found, made = blas.mkl() or stand_in(), []
    if not found:
        pytest.skip("neither MKL nor OpenBLAS with sizes of 64 bits is installed")

    def noted(code: Any) -> Any:
        return lambda *arguments: (made.append(arguments), code(*arguments))

    monkeypatch.setattr(blas, "mkl", lambda: {kind: noted(code) for kind, code in found.items()})
    return made


def drawn(rows: int, columns: int, dtype: Any, how: str) -> np.ndarray:
    """Return a matrix that lies in memory as asked."""
    draw = np.random.default_rng(rows * columns)
    if how == "transposed":
        return drawn(columns, rows, dtype, "plain").T
    if how == "part":  # some columns of a wider one
        return draw.standard_normal((rows, columns + 5)).astype(dtype)[:, 2 : 2 + columns]
    if how == "backwards":
        return draw.standard_normal((rows, columns)).astype(dtype)[::-1]
    if how == "apart":  # every other column
        return draw.standard_normal((rows, 2 * columns)).astype(dtype)[:, ::2]
    return draw.standard_normal((rows, columns)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [(64, 32, 48), (1, 256, 200), (300, 1, 128), (190, 200, 1)])
def test_equals_numpy_however_operands_lie(calls: list[Any], sizes: Any, dtype: Any) -> None:
    n, k, m = sizes
    tolerance = 1e-4 if dtype is np.float32 else 1e-12
    ways = "plain", "transposed", "part", "backwards", "apart"
    for left, right in ((a, b) for a in ways for b in ways):
        x, y = drawn(n, k, dtype, left), drawn(k, m, dtype, right)
        wanted = x.astype(np.float64) @ y.astype(np.float64)
        np.testing.assert_allclose(blas.product(x, y), wanted, atol=tolerance)
        bias = np.arange(m).astype(dtype)
        np.testing.assert_allclose(
            blas.product(x, y, bias=bias), wanted + bias, rtol=1e-6, atol=tolerance
        )
        for way in ways:  # of what it is added to
            out = drawn(n, m, dtype, way)
            before = out.copy()
            assert blas.product(x, y, out, add=True) is out
            np.testing.assert_allclose(out, before + wanted, atol=tolerance)
    assert calls


def test_what_is_small_or_of_other_numbers_goes_by_numpy(calls: list[Any]) -> None:
    whole = np.arange(10_000).reshape(100, 100)
    assert (blas.product(whole, whole) == whole @ whole).all()
    few = np.ones((8, 8), np.float32)
    assert (blas.product(few, few) == 8).all()
    assert blas.product(np.ones((0, 300)), np.ones((300, 300))).shape == (0, 300)
    assert (blas.product(np.ones((300, 0)), np.ones((0, 300))) == 0).all()
    with pytest.raises(ValueError, match="mismatch"):
        blas.product(np.ones((300, 300)), np.ones((299, 300)))
    assert not calls


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(blas.SWITCH, "0")
    assert blas.mkl.__wrapped__() == {}
