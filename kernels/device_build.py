"""The compiler of CUDA kernels, run as a process: `python -m ... MODULE CAPABILITY FOLDER`.

Numba makes PTX of each version of a module's kernels, and ptxas of CUDA's wheels makes machine code
of that, and tells what it takes: registers, shared memory, and what did not fit.  No GPU is needed.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from numba import cuda
from numba.cuda import dispatcher

from mpipar.kernels import device_types
from mpipar.kernels.device import Kernel, resolved

assert device_types  # importing it tells Numba of the number types


@dataclass(frozen=True)
class Version:
    """A compiled version of a kernel; sizes in bytes."""

    label: str
    target: str  # an architecture: "80", "90", "90a"
    ptx: str
    cubin: bytes  # empty where there is no ptxas
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


def versions(module: str, capability: str) -> Iterator[Version]:
    """Compile all of a module that a device of this compute capability, such as "90", can run."""
    for kernel in kernels(module):
        if kernel.target in ("", capability, f"{capability}a"):
            for dtype in kernel.dtypes:
                yield compile_version(kernel, dtype, kernel.target or capability)


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
    return _assemble(kernel.label(dtype), target, ptx, kernel.shared)


def _assemble(label: str, target: str, ptx: str, dynamic: int) -> Version:
    """Make machine code of PTX; `dynamic`: bytes of shared memory that PTX does not say."""
    tool = assembler()
    if tool is None:
        return Version(label, target, ptx, b"", 0, dynamic, 0, 0, 0)
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
        label, target, ptx, cubin,
        told(r"Used (\d+) registers"), told(r"(\d+) bytes smem") + dynamic,
        told(r"(\d+) bytes stack frame"),
        told(r"(\d+) bytes spill stores") + told(r"(\d+) bytes spill loads"),
        len(re.findall(r"\(C\d+\)", done.stderr)),
    )  # fmt: skip


def assembler() -> str | None:
    """Return the path of ptxas: that of the wheels, else the one in PATH."""
    for folder in sys.path:
        for place in ("nvidia/cuda_nvcc/bin", "nvidia/cu13/bin"):
            if os.access(tool := Path(folder, place, "ptxas"), os.X_OK):
                return str(tool)
    return shutil.which("ptxas")


def main(module: str, capability: str, folder: Path) -> None:
    """Write one file a version, each appearing when it is complete."""
    for version in versions(module, capability):
        file = folder / (f"{version.label}.cubin" if version.cubin else f"{version.label}.ptx")
        own = file.with_name(f"{file.name}.{os.getpid()}")
        own.write_bytes(version.cubin or version.ptx.encode())
        own.replace(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
