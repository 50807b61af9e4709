"""Products of matrices on the host: by the BLAS of NumPy, or by Intel's MKL where it is installed.

    out = x y  [+ out, or + bias]     x (n, k), y (k, m), either of them transposed in memory

MKL comes with `pip install "mpipar[mkl]"` and is then found by itself; MPIPAR_MKL=0 leaves it
alone.  It adds to `out` without a temporary.  It has as many threads as NumPy's BLAS when it is
first used; for one thread those of its libraries that make threads are not loaded at all.
"""

import ctypes
import functools
import importlib.metadata
import os
from typing import Any

import numpy as np

SWITCH = "MPIPAR_MKL"
ROWS = 256  # of `out` that NumPy's product is added to at a time
SMALL = 1 << 15  # multiplications; for fewer, the call costs more than is won
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112  # of cblas.h
WITH_THREADS, SEQUENTIAL, SAME_BITS = 0, 1, 2  # of mkl_service.h; the last: from run to run
FUNCTIONS = {np.float32: "cblas_sgemm_64", np.float64: "cblas_dgemm_64"}


def product(
    x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None, *, add: bool = False,
    bias: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return x @ y (n, m), in `out` if given, plus what `out` holds (`add`), or plus bias (m,).

    All of one dtype, and `out` apart from the others.  Raises ValueError if they do not fit.
    """
    fit = x.dtype == y.dtype and x.shape[1] == len(y)
    if fit and x.size * y.shape[1] >= SMALL and x.dtype in mkl():
        target = np.empty((len(x), y.shape[1]), x.dtype) if out is None else out
        lie = _layout(x), _layout(y), _layout(target)
        if lie[0] and lie[1] and lie[2] and not lie[2][0]:
            return _by_mkl(x, lie[0], y, lie[1], target, lie[2][1], add, bias)
    return _by_numpy(x, y, out, add, bias)


def _by_numpy(
    x: np.ndarray, y: np.ndarray, out: np.ndarray | None, add: bool, bias: np.ndarray | None
) -> np.ndarray:
    if out is not None and add:
        for start in range(0, len(out), ROWS):
            rows = slice(start, start + ROWS)
            out[rows] += np.matmul(x[rows], y)
        return out
    out = np.matmul(x, y, out=out)
    if bias is not None:
        out += bias
    return out


def _by_mkl(
    x: np.ndarray, left: tuple[bool, int], y: np.ndarray, right: tuple[bool, int],
    out: np.ndarray, step: int, add: bool, bias: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    if bias is not None:
        out[...] = bias
    mkl()[x.dtype](
        ROW_MAJOR, TRANSPOSED if left[0] else PLAIN, TRANSPOSED if right[0] else PLAIN,
        *out.shape, x.shape[1], 1.0, x.ctypes.data, left[1], y.ctypes.data, right[1],
        1.0 if add or bias is not None else 0.0, out.ctypes.data, step,
    )  # fmt: skip
    return out


def _layout(x: np.ndarray) -> tuple[bool, int] | None:
    """Return whether x lies transposed, and the elements from a row to the next as it lies.

    None if it is neither rows nor columns of neighbours.
    """
    rows, columns = x.shape
    down, along = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
    if columns == 1 or x.strides[1] == x.itemsize:
        down = down if rows > 1 else columns
        return (False, down) if down >= columns and x.strides[0] % x.itemsize == 0 else None
    if rows == 1 or x.strides[0] == x.itemsize:
        return (True, along) if along >= rows and x.strides[1] % x.itemsize == 0 else None
    return None


@functools.cache
def mkl() -> dict[np.dtype, Any]:
    """Return MKL's product of each dtype; none where it is not installed or not wanted."""
    if os.environ.get(SWITCH, "1") == "0":
        return {}
    try:
        files = importlib.metadata.files("mkl") or []
        path = next(file.locate() for file in files if file.name.startswith("libmkl_rt.so"))
        threads = _threads()  # asked before MKL is there: the question would start it
        library = ctypes.CDLL(os.path.realpath(str(path)))
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError):
        return {}
    library.MKL_Set_Threading_Layer(SEQUENTIAL if threads == 1 else WITH_THREADS)
    library.MKL_CBWR_Set(SAME_BITS)
    library.MKL_Set_Num_Threads(threads)
    return {np.dtype(kind): declared(library[name], kind) for kind, name in FUNCTIONS.items()}


def declared(function: Any, kind: type) -> Any:
    """Return a function of cblas.h for products, of 64-bit sizes, with its types declared."""
    size, place = ctypes.c_int64, ctypes.c_void_p
    number = ctypes.c_float if kind is np.float32 else ctypes.c_double
    function.argtypes = [ctypes.c_int] * 3 + [size] * 3 + [number, place, size, place, size]
    function.argtypes += [number, place, size]
    function.restype = None
    return function


def _threads() -> int:
    """Return how many threads NumPy's BLAS has."""
    import threadpoolctl

    pools = threadpoolctl.threadpool_info()
    return max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)
