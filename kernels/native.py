"""Loops in machine code: plain Python functions on float32 arrays, compiled by Numba, once.

    @loop
    def scale(x: Floats, y: Floats, n: int, factor: float) -> None:
        for i in range(n):
            y[i] = factor * x[i]

A rank never loads Numba, which would cost it 110 MB and a second.  Another process compiles all
loops (kernels/native_build.py) into a shared library of some 50 KB in the user's cache folder,
under a name made of the sources, Numba's version and the CPU; every rank loads that file.  Of the
processes of a machine the first one starts the compiler, and the others wait for the file.

MPIPAR_NUMBA=0 leaves the work to the NumPy version that every kernel has; it is also the one for
other numbers than float32, and where Numba is not installed.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import inspect
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mpipar.errors import ConfigError, explain
from mpipar.kernels.cache import cache_folder, locked

# types of a loop's arguments: contiguous arrays, which the loop sees flat
Floats = Annotated[np.ndarray, "float32"]
Ints = Annotated[np.ndarray, "int64"]
Bytes = Annotated[np.ndarray, "uint8"]

SWITCH = "MPIPAR_NUMBA"
MODULES = (  # of kernels/, with loops
    "adamw", "attention.loops", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm",
    "rms_norm", "rotary", "silu", "softmax",
)  # fmt: skip
SOURCES = ("native", "native_build", "native_math", "native_product", "native_vector")
SECONDS = 300  # the compiler may take
FLOAT32 = np.dtype(np.float32)
_space = ctypes.create_string_buffer(16)
_NOTHING = ctypes.addressof(_space)  # where compiled functions write that they return nothing


class Loop:
    """A function that runs as machine code; `python` is the one that was written."""

    def __init__(self, python: Callable[..., None]) -> None:
        """Take a function of Floats, Ints, Bytes, int and float, all of them annotated."""
        self.python = python
        module = python.__module__.removeprefix("mpipar.kernels.").replace(".", "_")
        self.name = f"{module}_{python.__name__}"
        self.kinds = [p.annotation for p in inspect.signature(python).parameters.values()]
        self._code: Any = None

    def __call__(self, *arguments: Any) -> None:
        """Run it; `usable` was asked of the arrays."""
        code = self._code or self._find()
        plain = [a.ctypes.data if type(a) is np.ndarray else a for a in arguments]
        code(_NOTHING, _NOTHING, *plain)

    def _find(self) -> Any:
        library = _library()
        if library is None:
            rule = "loops in machine code are switched off, or Numba is not installed"
            raise ConfigError(explain(SWITCH, os.environ.get(SWITCH), rule, "Ask usable() first"))
        code = library(self.name)
        numbers = {int: ctypes.c_ssize_t, float: ctypes.c_float}
        kinds: list[Any] = [numbers.get(kind, ctypes.c_void_p) for kind in self.kinds]
        code.argtypes, code.restype = [ctypes.c_void_p, ctypes.c_void_p, *kinds], None
        self._code = code
        return code


def loop(python: Callable[..., None]) -> Loop:
    """Make a function a Loop (a decorator)."""
    return Loop(python)


def usable(*arrays: Any) -> bool:
    """Say whether loops take these arrays: float32 and C-contiguous, and loops are to be used.

    Compiles them if that was not done on this machine: call `compile_cpu` early.
    """
    for x in arrays:
        if type(x) is not np.ndarray or x.dtype != FLOAT32 or not x.flags.c_contiguous:
            return False
    return _library() is not None


def compile_cpu() -> bool:
    """Make the loops ready, and say whether they are used.

    On every rank, before the first step: one process of a machine compiles, for about 10 s, and the
    others wait; later it takes milliseconds.  Raises ConfigError if the compiler fails.
    """
    return _library() is not None


@functools.cache
def _library() -> Callable[[str], Any] | None:
    """Return a function from a name to machine code; None where there are no loops."""
    if os.environ.get(SWITCH, "1") == "0" or sys.byteorder != "little":
        return None
    try:
        version = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return None
    name = f"loops-{_key(version)}"
    cache = cache_folder()
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{name}.lock"):
            found = _find(cache, name) or _compile(cache, name)
        return _load(found)
    with tempfile.TemporaryDirectory() as folder:  # the cache cannot be written
        return _load(_compile(Path(folder), name))


def _key(version: str) -> str:
    """Return what the machine code depends on, as a hash: sources, Numba, Python and the CPU."""
    here = Path(__file__).parent
    names = sorted([*SOURCES, *MODULES])
    parts = [version, sys.version, platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # Linux: the first processor's model and features
        cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        parts += [line for line in cpu if line.startswith(("model name", "flags", "Features"))]
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in names:
        digest.update((here / f"{name.replace('.', '/')}.py").read_bytes())
    return digest.hexdigest()[:20]


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of machine code, if it is there: a library, or an object not linked."""
    files = (folder / f"{name}{suffix}" for suffix in (".so", ".o"))
    return next((file for file in files if file.exists()), None)


def _compile(folder: Path, name: str) -> Path:
    """Compile all loops into `folder`, in another process (-P: of this mpipar, wherever we are).

    Raises ConfigError with the compiler's last words if it fails.
    """
    package = Path(sys.modules["mpipar"].__path__[0]).parent
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mpipar.kernels.native_build", str(folder / name)],
        capture_output=True, text=True, timeout=SECONDS, env=os.environ | {"PYTHONPATH": path},
        check=False,
    )  # fmt: skip
    found = _find(folder, name)
    if done.returncode or found is None:
        rule = f"Numba could not compile the loops: {done.stderr[-500:]}"
        raise ConfigError(explain(SWITCH, 1, rule, f"Set {SWITCH}=0 to do without them"))
    return found


def _load(file: Path) -> Callable[[str], Any]:
    """Return a function from a name to the machine code in a file."""
    if file.suffix == ".so":
        library = ctypes.CDLL(str(file))
        return lambda name: library[name]
    import llvmlite.binding as llvm  # no linker here: LLVM's own puts the object into memory

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(file)))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None)

    def find(name: str, kept: Any = (engine, machine)) -> Any:
        return ctypes.cast(engine.get_function_address(name), function)

    return find
