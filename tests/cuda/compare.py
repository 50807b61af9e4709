"""How results on a device are compared with a float64 reference."""

from typing import Any

import numpy as np

from mpipar.arrays import compute_dtype

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def close(got: Any, wanted: np.ndarray, roundings: float = 8) -> None:
    """Compare within some roundings of the type, of the largest element where it is above 1."""
    host = got.get() if hasattr(got, "get") else got
    eps = EPS[host.dtype.name] + roundings * EPS[compute_dtype(host.dtype).name]
    host = np.asarray(host, np.float64)
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(host, wanted, rtol=eps, atol=roundings * eps * scale / 8)
