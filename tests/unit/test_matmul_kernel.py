"""kernels/matmul on host arrays against its float64 reference; what it refuses."""

from typing import Any

import numpy as np
import pytest

from mpipar.errors import BufferMismatchError, ConfigError
from mpipar.kernels.matmul import Task, matmul, reference


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_equals_its_reference(dtype: str, accumulate: bool) -> None:
    draw = np.random.default_rng(0)
    shapes = (2, 5, 3), (4, 5), (2, 3, 4), (2, 3, 4), (4,)
    a, b, c, like, bias = (draw.standard_normal(shape).astype(dtype) for shape in shapes)
    tolerance = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-2}[dtype]
    after: list[dict[str, Any]] = [{}, {"bias": bias}, {"activation": "silu", "up": like}]
    for more in [*after, {"activation": "gelu", "residual": like}]:
        wanted = reference(Task(a, b, True, True, accumulate, **more), c)
        how: dict[str, Any] = {"transpose_a": True, "transpose_b": True, "accumulate": accumulate}
        out = c.copy()
        for target in [out] if accumulate else [out, None]:
            got = matmul(a, b, out=target, **how, **more)
            assert got.dtype == dtype
            assert target is None or got is target
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"implementation": "cublas"}, ConfigError),
        ({"implementation": "fast"}, ConfigError),
        ({"accumulate": True}, ConfigError),
        ({"activation": "relu"}, ConfigError),
        ({"residual": np.ones(4)}, BufferMismatchError),
        ({"transpose_b": True}, BufferMismatchError),
    ],
)
def test_refuses(how: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        matmul(np.ones((2, 3)), np.ones((3, 4)), **how)
