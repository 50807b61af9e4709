"""Where compiled CUDA kernels lie: one file a version, in a folder of the user's cache.

Beside them, a file a module says what the assembler told of each.  The folder's name holds what the
machine code depends on: the architecture, the sources of all kernels, Numba's version.  Another
process compiles (kernels/device_build.py), a module of kernels at a time, when one of them is first
needed, or all of them by `compile_cuda`.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mpipar.errors import ConfigError, explain
from mpipar.kernels.cache import cache_folder, locked

SECONDS = 600  # the compiler may take for a module
HERE = Path(__file__).parent


def modules() -> tuple[str, ...]:
    """Return the names of all modules of kernels/ that have CUDA kernels, by their sources."""
    found = (
        ".".join(file.relative_to(HERE).with_suffix("").parts)
        for file in sorted(HERE.rglob("*.py"))
        if not file.name.startswith("device")
        and "mpipar.kernels.device import" in (text := file.read_text())
        and "kernel(" in text
    )
    return tuple(found)


def compiled(module: str, capability: str, label: str) -> Path:
    """Return the file of a version: a cubin, or PTX where there is no assembler.

    `capability` is the device's, such as "90".  Raises ConfigError if the compiler fails.
    """
    folder = _folder(capability)
    found = _file(folder, label)
    if found is None:
        with locked(folder / f"{module}.lock"):
            if _file(folder, label) is None:
                _compile(module, {capability: folder})
        found = _file(folder, label)
    if found is None:
        rule = f"it is not among the kernels of {module} for compute capability {capability}"
        raise ConfigError(explain("kernel", label, rule, "Choose another kernel for this GPU"))
    return found


def compile_cuda(capability: str) -> None:
    """Compile all kernels for a device, several modules at a time, where that was not done yet."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda module: told(module, capability), modules()))


def told(module: str, *capabilities: str) -> list[dict[str, Any]]:
    """Return a row for each version of a module, compiled if it was not: see device_build.row."""
    files = {one: _folder(one) / f"{module}.json" for one in sorted(capabilities)}
    with contextlib.ExitStack() as locks:
        for file in files.values():
            locks.enter_context(locked(file.with_name(f"{module}.lock")))
        missing = {one: file.parent for one, file in files.items() if not file.exists()}
        if missing:
            _compile(module, missing)
    return [row for file in files.values() for row in json.loads(file.read_text())]


def _compile(module: str, folders: dict[str, Path]) -> None:
    """Compile the kernels of a module into the folder of each capability, in another process."""
    package = Path(sys.modules["mpipar"].__path__[0]).parent
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    places = [str(word) for place in folders.items() for word in place]
    command = ["-m", "mpipar.kernels.device_build", module, *places]
    ours, its = os.pipe()[::-1]  # it ends when this process has closed its end, however it ends
    try:
        done = subprocess.run(
            [sys.executable, *command], stdin=its, capture_output=True, text=True, check=False,
            timeout=SECONDS, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(its)
    if done.returncode:
        rule = f"Numba could not compile the kernels of {module}: {done.stderr[-500:]}"
        fix = 'Install the extra cuda12 or cuda13, as the driver is: pip install ".[cuda13]"'
        raise ConfigError(explain("device", "cuda", rule, fix))


def _file(folder: Path, label: str) -> Path | None:
    files = (folder / f"{label}{suffix}" for suffix in (".cubin", ".ptx"))
    return next((file for file in files if file.exists()), None)


@functools.cache
def _folder(capability: str) -> Path:
    """Return the folder for a device, made if it was not there."""
    parts = [sys.version, importlib.metadata.version("numba-cuda"), str(assembler() is None)]
    digest = hashlib.sha256("\n".join(parts).encode())
    for file in sorted(HERE.rglob("*.py")):
        digest.update(file.read_bytes())
    folder = cache_folder() / f"cuda-sm{capability}-{digest.hexdigest()[:20]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def assembler() -> str | None:
    """Return the path of ptxas: that of the wheels, else the one in PATH."""
    for folder in sys.path:
        for place in ("nvidia/cuda_nvcc/bin", "nvidia/cu13/bin"):
            if os.access(tool := Path(folder, place, "ptxas"), os.X_OK):
                return str(tool)
    return shutil.which("ptxas")
