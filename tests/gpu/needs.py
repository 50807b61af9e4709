"""What the tests of this folder need, or why they are skipped."""

from typing import Any

import pytest


def cupy_or_skip() -> Any:
    """Return CuPy; skip the test, with the reason, where there is none or no GPU."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no usable GPU: {error}")
    if not count:
        pytest.skip("there is no GPU")
    return cupy
