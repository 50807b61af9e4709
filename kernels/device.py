"""CUDA kernels, written in Python beside their operation; Numba makes machine code of them.

    @kernel("T[], T[], int64")              one version for each number type T of `dtypes`
    def double(x, y, n):                    arrays are flat and contiguous
        i = cuda.grid(1)
        if i < n:
            y[i] = narrow(widen(x[i]) * constant(2, x), y)

    double(blocks, threads, x, y, x.size)   on CuPy arrays, on CuPy's current stream

No process that trains loads Numba: another one compiles (kernels/device_build.py), and CuPy loads
what it left in the user's cache.  So `cuda` below, and kernels and device functions that a kernel
names, stand for what Numba puts in their place when it compiles.  With NUMBA_ENABLE_CUDASIM=1,
kernels run on NumPy arrays in Numba's simulator.

bfloat16 has no type in Numba's arrays: kernels see its bits, uint16.
"""

import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.arrays import Array, compute_dtype
from mpipar.errors import BufferMismatchError, ConfigError, explain

BITS = {"bfloat16": "uint16"}  # how Numba sees a dtype, where not by its name
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64")
WIDE = {name: name for name in ("float64", *WHOLE)}  # what is computed in itself, not in float32
THREADS = 256  # of a block of an elementwise kernel
FLOATS = ("float32", "float16", "bfloat16", "float64")


def simulated() -> bool:
    """Say whether kernels run in Numba's simulator, on NumPy arrays."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


class Deferred:
    """Something that a kernel names, and that becomes another thing when Numba compiles it."""

    def resolve(self) -> Any:
        """Return what Numba shall see."""
        raise NotImplementedError


class _Cuda(Deferred):
    """Stands for numba.cuda, which takes a second to import."""

    def resolve(self) -> Any:
        return importlib.import_module("numba.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resolve(), name)


cuda: Any = _Cuda()


def resolved(python: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with all that is Deferred in what it names resolved."""
    names = {
        name: value.resolve() if isinstance(value, Deferred) else value
        for name, value in python.__globals__.items()
        if name in python.__code__.co_names or name.startswith("__")
    }
    cells = (cell.cell_contents for cell in python.__closure__ or ())
    closure = (x.resolve() if isinstance(x, Deferred) else x for x in cells)
    function = types.FunctionType(
        python.__code__, names, python.__name__, python.__defaults__,
        tuple(map(types.CellType, closure)),
    )  # fmt: skip
    function.__module__ = python.__module__
    return function


class _Running:
    """Stands for numba.cuda in device functions of the simulator: what its kernels see."""

    def __getattr__(self, name: str) -> Any:
        simulator = importlib.import_module("numba.cuda.simulator.kernel")
        return getattr(simulator._get_kernel_context(), name)


class DeviceFunction(Deferred):
    """A function that kernels call."""

    def __init__(self, python: Callable[..., Any]) -> None:
        self.python = python

    @functools.cache  # noqa: B019 - as long as the module lives
    def resolve(self) -> Any:
        """Return Numba's function, of any types; in the simulator the Python function."""
        python = resolved(self.python)
        if not simulated():
            return cuda.jit(device=True, forceinline=True)(python)
        if "cuda" in python.__globals__:  # the simulator replaces it only in kernels
            python.__globals__["cuda"] = _Running()
        return python

    def __call__(self, *arguments: Any) -> Any:
        """Run it as Python."""
        return self.python(*arguments)


def device(python: Callable[..., Any]) -> Any:
    """Make a function one that kernels call (a decorator)."""
    return DeviceFunction(python)


class Kernel:
    """A function that a grid of threads runs, in a version for each number type.

    `takes` lists its arguments' types: `T[]` an array of the version's number type, `W[]` one of
    the type that it is computed in, `W` such a number, or NumPy's names: `int64`, `int32[]`.
    """

    def __init__(
        self,
        python: Callable[..., Any],
        takes: str,
        dtypes: tuple[str, ...],
        threads: int | None,
        fast: bool,
        target: str,
        shared: int,
    ) -> None:
        self.python, self.dtypes, self.fast, self.threads = python, dtypes, fast, threads
        self.shared = shared
        self.module, self.name = python.__module__.removeprefix("mpipar.kernels."), python.__name__
        self.takes, self.target = [kind.strip() for kind in takes.split(",")], target
        self._key = next((n for n, kind in enumerate(self.takes) if kind == "T[]"), None)
        self._loaded: dict[tuple[int, str], Any] = {}

    def kinds(self, dtype: str) -> list[str]:
        """Return the types of the arguments of one version, in NumPy's names."""
        seen = {"T": BITS.get(dtype, dtype), "W": WIDE.get(dtype, "float32")}
        plain = (kind.removesuffix("[]") for kind in self.takes)
        ends = ("[]" if kind.endswith("[]") else "" for kind in self.takes)
        return [seen.get(kind, kind) + end for kind, end in zip(plain, ends, strict=True)]

    def label(self, dtype: str) -> str:
        """Return the name of one version: also its entry point's."""
        return f"{self.module.replace('.', '_')}_{self.name}_{dtype}"

    def __call__(
        self, blocks: int | tuple[int, ...], threads: int | tuple[int, ...], *arguments: Any,
        shared: int | None = None, dtype: str | None = None,
    ) -> None:  # fmt: skip
        """Start it on CuPy's current stream, and return at once.

        `shared` is the dynamic shared memory of a block, in bytes, if not the kernel's own; `dtype`
        the version, if no argument says it.  A grid without blocks does nothing.
        Raises BufferMismatchError for an array that is not contiguous, ConfigError for a number
        type that there is no version of.
        """
        grid, block = _three(blocks), _three(threads)
        if 0 in grid:
            return
        shared = self.shared if shared is None else shared
        if dtype is None:
            dtype = self.dtypes[0] if self._key is None else arguments[self._key].dtype.name
        if dtype not in self.dtypes:
            rule = f"there are versions for {', '.join(self.dtypes)}"
            raise ConfigError(explain(f"dtype of {self.name}", dtype, rule, "Convert the arrays"))
        kinds = self.kinds(dtype)
        if simulated():
            flat = [_bits(a, kind) for a, kind in zip(arguments, kinds, strict=True)]
            self._simulator()[grid, block, 0, shared](*flat)
            return
        packed = [x for a, kind in zip(arguments, kinds, strict=True) for x in pack(a, kind)]
        self._load(dtype, shared)(grid, block, tuple(packed), shared_mem=shared)

    @functools.cache  # noqa: B019 - as long as the module lives
    def _simulator(self) -> Any:
        return cuda.jit(resolved(self.python))

    def _load(self, dtype: str, shared: int) -> Any:
        """Return CuPy's function of one version on the current device, compiled if it must be."""
        import cupy

        from mpipar.kernels.device_cache import compiled

        key = (cupy.cuda.runtime.getDevice(), dtype)
        found = self._loaded.get(key)
        if found is None:
            file = compiled(self.module, cupy.cuda.Device().compute_capability, self.label(dtype))
            found = cupy.RawModule(path=str(file)).get_function(self.label(dtype))
            self._loaded[key] = found
        if shared > 48 << 10 and found.max_dynamic_shared_size_bytes < shared:
            found.max_dynamic_shared_size_bytes = shared
        return found


def kernel(
    takes: str,
    *,
    dtypes: tuple[str, ...] = FLOATS,
    threads: int | None = None,
    fast: bool = True,
    target: str = "",
    shared: int = 0,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a Kernel (a decorator).

    `threads` bounds those of a block, so that the compiler knows how many registers there are;
    `fast` lets it fuse, reorder and approximate; `target` is the only architecture it is for,
    such as "90a"; `shared` the dynamic shared memory of a block, in bytes.
    """
    return lambda python: Kernel(python, takes, dtypes, threads, fast, target, shared)


def pack(argument: Any, kind: str) -> list[Any]:
    """Return an argument as the words in which Numba's kernels take it.

    An array of n elements is seven: owner, parent, n, bytes an element, address, shape, strides.
    """
    if not kind.endswith("[]"):
        return [np.dtype(kind).type(argument)]
    _bits_fit(argument, kind)
    n, width = argument.size, argument.dtype.itemsize
    return [0, 0, n, width, argument.data.ptr, n, width]


def _bits_fit(x: Array, kind: str) -> None:
    """Raise BufferMismatchError if x is not contiguous or not of this type."""
    wanted = kind.removesuffix("[]")
    if BITS.get(x.dtype.name, x.dtype.name) != wanted:
        rule = f"the kernel takes {wanted} here"
        raise BufferMismatchError(explain("dtype", x.dtype.name, rule, "Convert it first"))
    if not x.flags.c_contiguous:
        rule = f"a kernel's arrays are contiguous, not of strides {x.strides}"
        raise BufferMismatchError(explain("array", x.shape, rule, "Pass a contiguous copy"))


def _bits(argument: Any, kind: str) -> Any:
    """Return an argument for the simulator: arrays flat, bfloat16 as its bits."""
    if not kind.endswith("[]"):
        return np.dtype(kind).type(argument)
    _bits_fit(argument, kind)
    return argument.reshape(-1).view(kind.removesuffix("[]"))


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the three sides of a grid or a block."""
    sides = (size,) if isinstance(size, int) else size
    return (*sides, *(1,) * (3 - len(sides)))


def blocks(n: int, threads: int) -> int:
    """Return how many blocks of `threads` cover n elements."""
    return -(-n // threads)


# --- number types: what kernels say instead of casts; as Python for the simulator ---------------


def widen(value: Any) -> Any:
    """Return an element as the number that is computed with: float32, or float64 of float64."""
    if type(value) is np.uint16:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return np.float32(value) if type(value) is np.float16 else value


def narrow(value: Any, array: Any) -> Any:
    """Return a number as an element of `array`, rounded to nearest even."""
    if array.dtype == np.uint16:
        return np.float32(value).astype(_bfloat16()).view(np.uint16)
    return array.dtype.type(value)


def constant(value: Any, array: Any) -> Any:
    """Return a literal as a number of the type that elements of `array` are computed in."""
    return np.float64(value) if array.dtype == np.float64 else np.float32(value)


@functools.cache
def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def wide_dtype(x: Array) -> np.dtype:
    """Return the dtype in which elements of x are computed."""
    return compute_dtype(x.dtype)
