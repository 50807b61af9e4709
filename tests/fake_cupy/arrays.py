"""Device arrays over host memory: NumPy computes, the current stream notes what it used."""

import os
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.fake_cupy.streams import check, forget, get_current_stream, host, merge

mpi = SimpleNamespace(aware=False, device_messages=0)  # whether it sees device memory, how often


REDUCES = (("reduce", np.add), ("reduce", np.multiply))


def span(x: np.ndarray) -> tuple[int, int]:
    """Return the addresses that x lies between."""
    low, high = np.lib.array_utils.byte_bounds(x)
    return low, high if x.size else low


class Pointer:
    """Where an array begins."""

    def __init__(self, address: int) -> None:
        self.ptr = address


class ndarray(NDArrayOperatorsMixin):
    """An array that only `get` brings to the host."""

    __array_priority__ = 100

    def __init__(self, memory: np.ndarray) -> None:
        self._host = memory
        if memory.base is None:
            weakref.finalize(memory, forget, *span(memory))

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    base = property(lambda self: None if self._host.base is None else ndarray(self._host.base))
    T = property(lambda self: ndarray(self._host.T))
    data = property(lambda self: Pointer(self._host.ctypes.data))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        caller = sys._getframe(1).f_code
        if not caller.co_filename.endswith(os.path.join("mpipar", "arrays.py")):  # it is MPI
            if not mpi.aware:
                raise AssertionError("MPI is given device memory, which it cannot see")
            assert self.flags.c_contiguous, "a strided device array leaves for MPI"
            check(host, *span(self._host), "receiv" in caller.co_name, "MPI")
            mpi.device_messages += 1
        place = (self._host.ctypes.data, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": place, "version": 3}

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, where: Any) -> "ndarray":
        return compute(lambda w: self._host[w], (where,), {}, reads=[self])

    def __setitem__(self, where: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("a host array is set where a device array is wanted")
        get_current_stream().run()
        part = np.asarray(self._host[_plain(where)])
        written = part if np.may_share_memory(part, self._host) else self._host
        used(_arrays((value, where)), [ndarray(written)])
        self._host[_plain(where)] = _plain(value)

    def get(self) -> np.ndarray:
        """Copy it to the host, which waits for the stream."""
        used([self], [])
        get_current_stream().synchronize()
        check(host, *span(self._host), False, "get")
        return self._host.copy()

    def set(self, values: np.ndarray) -> None:
        """Copy from the host."""
        if type(values) is not np.ndarray or values.dtype != self.dtype:
            raise TypeError("set takes a host array of the same dtype")
        used([], [self])
        self._host[...] = values.reshape(self.shape)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        if method != "__call__" and (method, ufunc) not in REDUCES:
            raise NotImplementedError(f"{ufunc.__name__}.{method} is none of CuPy's")
        return compute(getattr(ufunc, method), inputs, how)

    def __array_function__(self, function: Any, types: Any, inputs: Any, how: Any) -> Any:
        return compute(function, inputs, how)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(np.ndarray, name, None)):
            raise AttributeError(name)
        return lambda *inputs, **how: compute(getattr(self._host, name), inputs, how, [self])

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())


def _plain(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, tuple | list):
        return type(x)(_plain(one) for one in x)
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("host and device arrays in one operation")
    return x


def _arrays(x: Any) -> list[ndarray]:
    if isinstance(x, ndarray):
        return [x]
    return [a for one in x for a in _arrays(one)] if isinstance(x, tuple | list) else []


def _lifted(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        return ndarray(np.asarray(x))
    return type(x)(_lifted(one) for one in x) if isinstance(x, tuple | list) else x


def used(reads: list[ndarray], writes: list[ndarray]) -> None:
    """Note work on the current stream, after what it still had to do."""
    stream = get_current_stream()
    stream.run()
    merge(stream.clock, host)
    stream.use([span(x._host) for x in reads], [span(x._host) for x in writes], "kernel")


def compute(function: Any, inputs: Any, how: Any, reads: Any = ()) -> Any:
    """Run a function of NumPy on the memory of the arrays."""
    out = _arrays(how.get("out"))
    stream = get_current_stream()
    stream.run()
    result = function(*_plain(tuple(inputs)), **{k: _plain(v) for k, v in how.items()})
    for x in (*reads, *_arrays(tuple(inputs))):
        if result is x._host and not out:
            return x
    moved = isinstance(result, np.ndarray) and any(
        np.may_share_memory(result, x._host) for x in (*reads, *_arrays(tuple(inputs)))
    )
    if moved and not out:  # a view reads nothing
        return ndarray(result)
    made = out[0] if out else _lifted(result)
    used([*reads, *_arrays(tuple(inputs))], _arrays(made))
    return made


def asnumpy(x: Any) -> np.ndarray:
    """Copy to the host."""
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


def asarray(x: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """Copy to the device, unless x is there."""
    if isinstance(x, ndarray):
        if order == "C" and not x.flags.c_contiguous:
            x = ndarray(np.ascontiguousarray(x._host))
        return x if dtype is None or x.dtype == np.dtype(dtype) else x.astype(dtype)
    return ndarray(np.array(x, dtype))


def array(x: Any, dtype: Any = None, order: str = "K", copy: bool = True) -> ndarray:
    """Copy, unless the copy is not wanted."""
    if not isinstance(x, ndarray):
        return ndarray(np.array(x, dtype))
    if not copy:
        return asarray(x, dtype, order)
    used([x], [])
    made = ndarray(np.array(x._host, dtype, order=order))  # type: ignore[call-overload]
    used([], [made])
    return made


_MADE = ["empty", "zeros", "ones", "full", "arange", "eye"]
_SAME = [
    "split",
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "exp",
    "log",
    "sqrt",
    "tanh",
    "negative",
    "abs",
    "sign",
    "where",
    "concatenate",
    "stack",
    "matmul",
    "ascontiguousarray",
    "broadcast_to",
    "copyto",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "may_share_memory",
    "isfinite",
    "square",
    "power",
    "clip",
    "sum",
    "max",
    "min",
    "prod",
    "mean",
    "argmax",
    "transpose",
    "swapaxes",
    "delete",
    "array_split",
    "take",
    "put_along_axis",
    "take_along_axis",
    "cumsum",
    "argsort",
    "bincount",
    "count_nonzero",
    "logical_and",
    "logical_or",
    "less",
    "greater",
    "equal",
    "not_equal",
    "multiply",
    "einsum",
    "dot",
    "promote_types",
    "flatnonzero",
    "searchsorted",
    "unique",
    "expand_dims",
    "squeeze",
    "moveaxis",
    "isinf",
    "isnan",
]


def array_module() -> dict[str, Any]:
    """Return the functions of the module."""

    def lift_of(function: Any) -> Any:
        return lambda *inputs, **how: _lifted(compute(function, inputs, how))

    made: dict[str, Any] = {name: lift_of(getattr(np, name)) for name in (*_MADE, *_SAME)}
    made["may_share_memory"] = lambda a, b: np.may_share_memory(_plain(a), _plain(b))
    names = "float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool_ dtype"
    made |= {name: getattr(np, name) for name in names.split()}
    tricks = SimpleNamespace(as_strided=lift_of(np.lib.stride_tricks.as_strided))
    made["lib"] = SimpleNamespace(stride_tricks=tricks)
    return made | {"ndarray": ndarray, "asnumpy": asnumpy, "asarray": asarray, "array": array}
