"""The compiler of CUDA kernels, run as a process: `python -m ... MODULE CAPABILITY FOLDER ...`.

Numba makes PTX of each version of a module's kernels, and ptxas of CUDA's wheels makes machine code
of that, and tells what it takes: registers, shared memory, and what did not fit.  No GPU is needed.
It ends when its standard input does, so that none is left behind by a parent that is killed.
"""

import functools
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numba import cuda
from numba.cuda import compiler, dispatcher

from mpipar.kernels import device_types
from mpipar.kernels.device import THREADS, Kernel, resolved
from mpipar.kernels.device_cache import assembler

assert device_types  # importing it tells Numba of the number types

COUNTED = {  # instructions in PTX
    "mma": r"mma\.sync|wgmma\.mma_async",
    "loads16": r"ld\.global(?:\.nc)?\.(?:v4\.[bfsu]32|v2\.[bfsu]64)",
    "copies16": r"cp\.async\.c[ag]\.shared\.global[^;]*, 16",
}


@dataclass(frozen=True)
class Version:
    """A compiled version of a kernel; sizes in bytes."""

    label: str
    target: str  # an architecture: "80", "90", "90a"
    ptx: str
    cubin: bytes  # empty where there is no ptxas
    threads: int  # of a block, at most
    registers: int
    shared: int  # a block, with what a kernel always takes of dynamic memory
    stack: int  # a thread
    spills: int  # loads and stores of registers that did not fit
    remarks: int  # of ptxas, such as that it must wait for tensor cores where the kernel does not


def kernels(module: str) -> list[Kernel]:
    """Return the kernels that a module of kernels/ defines."""
    names = vars(importlib.import_module(f"mpipar.kernels.{module}"))
    found = [*names.values(), *names.get("KERNELS", ())]
    return [x for x in found if isinstance(x, Kernel) and x.module == module]


def versions(module: str, *capabilities: str) -> Iterator[tuple[str, Version]]:
    """Compile all of a module that devices of these compute capabilities, such as "90", can run.

    Gives each with its capability.
    """
    for kernel in kernels(module):
        for dtype in kernel.dtypes:
            for capability in capabilities:
                if kernel.target in ("", capability, f"{capability}a"):
                    yield capability, compile_version(kernel, dtype, kernel.target or capability)


def _share_typing() -> None:
    """Let Numba type a version once for all architectures, which takes most of the time.

    From compute capability 8.0 on, what comes of that is the same.
    """
    plain = vars(compiler)["_compile_pyfunc_with_fixup"]
    last: dict[object, object] = {}

    @functools.wraps(plain)
    def typed(python: Any, signature: str, **options: Any) -> object:
        key = (python, signature, *sorted((k, v) for k, v in options.items() if k != "cc"))
        if key not in last:
            last.clear()
            last[key] = plain(python, signature, **options)
        return last[key]

    vars(compiler)["_compile_pyfunc_with_fixup"] = typed


def compile_version(kernel: Kernel, dtype: str, target: str) -> Version:
    """Compile one version of a kernel for an architecture."""
    number, letter = int(target.rstrip("a")), target.lstrip("0123456789")
    architecture = (number // 10, number % 10, *((letter,) if letter else ()))
    # device functions are compiled for the current device: there is none
    vars(dispatcher)["get_current_device"] = lambda: SimpleNamespace(
        compute_capability=architecture
    )
    kinds = (kind.replace("[]", "[::1]") for kind in kernel.kinds(dtype))
    ptx, _ = cuda.compile(
        resolved(kernel.python), f"void({', '.join(kinds)})", device=False, abi="numba",
        cc=architecture, fastmath=kernel.fast, launch_bounds=kernel.threads, output="ptx",
    )  # fmt: skip
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    ptx = ptx.replace(entry, kernel.label(dtype))
    align = 1024 if letter else 16  # for tensor cores' descriptors, for reads of 16 bytes
    ptx = re.sub(r"(\.shared \.align) [248]\b", rf"\1 {align}", ptx)
    return _assemble(kernel, kernel.label(dtype), target, ptx)


def _assemble(kernel: Kernel, label: str, target: str, ptx: str) -> Version:
    """Make machine code of PTX."""
    tool, threads = assembler(), kernel.threads or THREADS
    dynamic = kernel.shared  # PTX does not say it
    if tool is None:
        return Version(label, target, ptx, b"", threads, 0, dynamic, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "in.ptx"), Path(folder, "out.cubin")
        source.write_text(ptx)
        done = subprocess.run(
            [tool, "-v", "-O3", f"-arch=sm_{target}", source, "-o", result],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{label} for sm_{target}: {done.stderr[-2000:]}")
        cubin = result.read_bytes()

    def told(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, done.stderr))

    return Version(
        label, target, ptx, cubin, threads,
        told(r"Used (\d+) registers"), told(r"(\d+) bytes smem") + dynamic,
        told(r"(\d+) bytes stack frame"),
        told(r"(\d+) bytes spill stores") + told(r"(\d+) bytes spill loads"),
        len(re.findall(r"\(C\d+\)", done.stderr)),
    )  # fmt: skip


def row(version: Version) -> dict[str, str | int]:
    """Return all that is known of a version but its code."""
    told = {name: x for name, x in vars(version).items() if name not in ("label", "ptx", "cubin")}
    counts = {name: len(re.findall(pattern, version.ptx)) for name, pattern in COUNTED.items()}
    return {"kernel": version.label, **told, **counts}


def main(module: str, places: dict[str, Path]) -> None:
    """Write a file a version into the folder of each capability, and MODULE.json: a row of each.

    Files appear when they are complete.
    """
    rows: dict[str, list[Any]] = {capability: [] for capability in places}
    for capability, version in versions(module, *places):
        suffix, code = ("cubin", version.cubin) if version.cubin else ("ptx", version.ptx.encode())
        _write(places[capability] / f"{version.label}.{suffix}", code)
        rows[capability].append(row(version))
    for capability, folder in places.items():
        _write(folder / f"{module}.json", json.dumps(rows[capability]).encode())


def _write(file: Path, content: bytes) -> None:
    own = file.with_name(f"{file.name}.{os.getpid()}")
    own.write_bytes(content)
    own.replace(file)


def _end_with_input() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    gc.disable()  # a tenth of the time
    _share_typing()
    main(sys.argv[1], dict(zip(sys.argv[2::2], map(Path, sys.argv[3::2]), strict=True)))
