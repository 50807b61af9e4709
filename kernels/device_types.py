"""The number types of kernels for Numba's compiler: widen, narrow and constant of device.py."""

from typing import Any

import numpy as np
from numba.cuda import types
from numba.cuda.extending import overload

from mpipar.kernels import device

HALF_WAY, ONE, SHIFT = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
NAN = np.uint16(0x7FC0)


@overload(device.widen, strict=False)
def _widen(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << SHIFT).view(np.float32)
    if value == types.float16:
        return lambda value: np.float32(value)
    return lambda value: value


@overload(device.narrow, strict=False)
def _narrow(value: Any, array: Any) -> Any:
    if array.dtype == types.uint16:

        def to_bfloat16(value: Any, array: Any) -> Any:  # to nearest, ties to even
            number = np.float32(value)
            bits = number.view(np.uint32)
            rounded = np.uint32(bits + HALF_WAY + np.uint32((bits >> SHIFT) & ONE))
            return NAN if number != number else np.uint16(rounded >> SHIFT)

        return to_bfloat16
    if array.dtype == types.float16:
        return lambda value, array: np.float16(value)
    if array.dtype == types.float32:
        return lambda value, array: np.float32(value)
    return lambda value, array: value


@overload(device.constant, strict=False)
def _constant(value: Any, array: Any) -> Any:
    if array.dtype == types.float64:
        return lambda value, array: np.float64(value)
    return lambda value, array: np.float32(value)
