"""What MPI may be given: contiguous memory, as bytes, in pieces that fit its counts.

Point-to-point messages travel as bytes, whatever the dtype (the additions are ours).  Only the
library's own reductions need an MPI datatype; 16-bit floats have none there, on purpose: MPI
libraries add them in 16 bits, and four times 30000 becomes infinite.

MPI-3 counts are 32-bit.  `LIMIT` bytes is the largest single message; longer ones are cut in
pieces, alike at both ends (tests lower it).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import Array, is_device, module, module_of
from mpipar.errors import BufferMismatchError, DtypeMismatchError, explain

LIMIT = 2**31 - 2**16

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)

_LIBRARY_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "int16": MPI.INT16_T,
    "uint16": MPI.UINT16_T,
    "int32": MPI.INT32_T,
    "uint32": MPI.UINT32_T,
    "int64": MPI.INT64_T,
    "uint64": MPI.UINT64_T,
    "complex64": MPI.COMPLEX,
    "complex128": MPI.DOUBLE_COMPLEX,
    "bool": MPI.C_BOOL,
}


def as_array(x: Any, parameter: str = "x") -> Array:
    """Return `x` as an array of a numeric dtype, in this machine's byte order; NumPy's if it is no
    device array.

    Raises DtypeMismatchError for a dtype that is not one of DTYPES.
    """
    try:
        array = x if type(x) is np.ndarray or is_device(x) else np.asarray(x)
    except ValueError as error:  # ragged lists
        raise DtypeMismatchError(
            explain(parameter, type(x).__name__, f"it must be an array ({error})", "Pass one")
        ) from error
    if array.dtype.name not in DTYPES:
        raise DtypeMismatchError(
            explain(
                f"{parameter}.dtype",
                str(array.dtype),
                f"it must be one of {', '.join(DTYPES)}",
                "Convert it",
            )
        )
    return (
        array
        if array.dtype.isnative or is_device(array)
        else array.astype(array.dtype.newbyteorder("="))
    )


def flat(x: Array) -> Array:
    """Return `x` as one dimension in row-major order; a copy only if it is not contiguous."""
    return x.reshape(-1) if x.flags.c_contiguous else module_of(x).ascontiguousarray(x).reshape(-1)


def empty(shape: int | tuple[int, ...], like: Array) -> Array:
    """Return a new array of the dtype of `like`, where that lives."""
    return module_of(like).empty(shape, like.dtype)


def address(x: Array) -> int:
    """Return where the first element of x lies."""
    return int(x.data.ptr) if is_device(x) else x.ctypes.data


def result_array(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, device: bool = False, parameter: str = "out"
) -> Array:
    """Return `out` after checking that a result of this shape and dtype fits, or a new array.

    It is a device array if `device`, and else one of the host.
    Raises BufferMismatchError if the shape differs or `out` is not contiguous and writable, and
    DtypeMismatchError if the dtype differs.  Nothing is written before the check.
    """
    if out is None:
        return module("cuda" if device else "cpu").empty(shape, dtype)
    if is_device(out) != device:
        rule = f"the result lives on the {'device' if device else 'host'}, as x does"
        raise BufferMismatchError(
            explain(parameter, type(out).__name__, rule, "Pass such an array")
        )
    if not device and type(out) not in (np.ndarray, np.memmap):
        raise DtypeMismatchError(
            explain(parameter, type(out).__name__, "it must be a plain array", "Pass one, or None")
        )
    if out.shape != shape:
        raise BufferMismatchError(
            explain(f"{parameter}.shape", out.shape, f"it must be {shape}", "Pass that shape")
        )
    if out.dtype != dtype:
        raise DtypeMismatchError(
            explain(f"{parameter}.dtype", str(out.dtype), f"it must be {dtype}", "Pass that")
        )
    writable = device or out.flags.writeable  # CuPy has no read-only arrays
    if not out.flags.c_contiguous or not writable:
        raise BufferMismatchError(
            explain(
                parameter,
                f"strides {out.strides}, writeable {writable}",
                "a receive buffer must be contiguous and writable",
                "Pass such an array, or out=None and copy the result",
            )
        )
    return out


def require_apart(x: Array, out: Any, same_place: bool, form: str) -> None:
    """Raise BufferMismatchError if x and out overlap, unless they do so in the one allowed form."""
    if out is not None and not same_place and module_of(x).may_share_memory(x, out):
        raise BufferMismatchError(
            explain("out", "memory of x", f"it must not overlap x{form}", "Pass another array")
        )


def library_type(dtype: np.dtype) -> MPI.Datatype:
    """Return the MPI datatype with which the library itself can add `dtype`.

    Raises DtypeMismatchError for 16-bit floats and for types that MPI does not have.
    """
    try:
        return _LIBRARY_TYPES[dtype.name]
    except KeyError:
        raise DtypeMismatchError(
            explain(
                "dtype",
                dtype.name,
                'algorithm="mpi" cannot add it without losing accuracy',
                'Use algorithm="auto" or "direct"',
            )
        ) from None


def pieces(data: np.ndarray, limit: int = 0) -> Iterator[list]:
    """Yield the buffer triples for a run of bytes (a uint8 array), none longer than `limit`.

    That is LIMIT if it is 0.
    """
    step = limit or LIMIT
    for start in range(0, data.size, step):
        part = data[start : start + step]
        yield [part, part.size, MPI.BYTE]
    if not data.size:
        yield [data, 0, MPI.BYTE]


def to_host(x: Array) -> np.ndarray:
    """Copy a device array to host memory; waits for the stream that writes it."""
    return module("cuda").asnumpy(x)


def to_device(x: np.ndarray) -> Array:
    """Copy a host array to the current device."""
    return module("cuda").asarray(x)
