"""What every layer needs to know of an array: its module, its dtype, whether a GPU holds it.

CuPy is imported only when an array or a device asks for it, so `import mpipar` stays cheap.
"""

from types import ModuleType
from typing import Any

import numpy as np

from mpipar.errors import ConfigError, explain

Array = Any  # numpy.ndarray or cupy.ndarray

SIXTEEN_BIT = ("float16", "bfloat16")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def dtype(name: Any) -> np.dtype:
    """Return the NumPy dtype for a name or dtype; "bfloat16" comes from ml_dtypes."""
    if isinstance(name, str) and name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_sixteen_bit(dt: np.dtype) -> bool:
    """Say whether `dt` is float16 or bfloat16: stored in 16 bits, added in float32."""
    return dt.itemsize == 2 and dt.name in SIXTEEN_BIT


def compute_dtype(dt: np.dtype) -> np.dtype:
    """Return the dtype in which sums of `dt` are taken: float32 for the 16-bit types."""
    return np.dtype(np.float32) if is_sixteen_bit(dt) else dt


def is_device(x: Any) -> bool:
    """Say whether `x` lives on a GPU: it has `__cuda_array_interface__`."""
    return not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")


def module_of(x: Any) -> ModuleType:
    """Return the module (numpy or cupy) whose functions work on `x`."""
    if type(x) is np.ndarray or not is_device(x):
        return np
    return module("cuda")


def beside(x: Array, like: Array) -> Array:
    """Return x where `like` lives; to the GPU it is copied."""
    return module("cuda").asarray(x) if is_device(like) and not is_device(x) else x


def module(device: str) -> ModuleType:
    """Return numpy for "cpu" and cupy for "cuda".

    Raises ConfigError for another device, or if CuPy is not installed.
    """
    if device == "cpu":
        return np
    if device != "cuda":
        raise ConfigError(
            explain("device", device, 'it must be "cpu" or "cuda"', "Choose one of them")
        )
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            explain("device", device, "it needs CuPy", 'Install the extra: pip install ".[cuda13]"')
        ) from error
    return cupy
