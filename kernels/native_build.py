"""The compiler of loops (kernels/native.py), run as a process: `python -m ... PATH`.

Numba turns every loop into LLVM's language, optimised for this CPU.  All of them together become
one object file, and where the machine has a C compiler, which then only links, a shared library:
PATH.so, or else PATH.o.
"""

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numba.extending
from numba import types

from mpipar.kernels import native, native_math, native_product, native_vector, silu
from mpipar.kernels.attention import loops as attention

KINDS: dict[Any, Any] = {
    native.Floats: types.CPointer(types.float32),
    native.Ints: types.CPointer(types.int64),
    native.Bytes: types.CPointer(types.uint8),
    int: types.intp,
    float: types.float32,
}
# sums may be taken in any order, products and sums fused; infinities and NaN are respected
FAST = {"reassoc", "contract", "arcp", "nsz"}
HELPERS = (  # which loops call
    native_math.power, native_math.exp, native_math.exp_below, native_math.ordered,
    native_math.largest, native_product.columns, attention.visible, attention.above,
    attention.pack_rows, attention.pack_across, attention.square, attention.exponentials,
    attention.differences, silu.share, silu.slope,
)  # fmt: skip
FEATURES = llvm.get_host_cpu_features().flatten()
if "+avx512f" in FEATURES:
    FEATURES += ",-prefer-256-bit"  # 30 % faster with the whole registers


def loops() -> list[native.Loop]:
    """Return the loops of all kernels."""
    modules = [importlib.import_module(f"mpipar.kernels.{name}") for name in native.MODULES]
    return [x for module in modules for x in vars(module).values() if isinstance(x, native.Loop)]


def optimised(loop: native.Loop) -> llvm.ModuleRef:
    """Return LLVM's module of one loop, whose function has the loop's name."""
    options: dict[str, Any] = {"fastmath": FAST, "error_model": "numpy", "nogil": True}
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    signature = types.void(*[KINDS[kind] for kind in loop.kinds])
    compiled = numba.njit(signature, **options)(loop.python)
    result = compiled.overloads[signature.args]
    module = llvm.parse_assembly(result.library.get_llvm_str())
    module.get_function(result.fndesc.llvm_func_name).name = loop.name
    return module


def machine() -> llvm.TargetMachine:
    """Return this CPU, for code that may lie anywhere in memory."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=FEATURES, opt=3, reloc="pic", codemodel="small"
    )


def link(code: Path, library: Path) -> bool:
    """Make a shared library of an object file, if there is a C compiler; say whether it worked."""
    tools = [shutil.which(name) for name in ("cc", "gcc", "clang")]
    for tool in filter(None, tools):
        done = subprocess.run([tool, "-shared", "-o", library, code], capture_output=True)
        if done.returncode == 0:
            try:
                ctypes.CDLL(str(library), os.RTLD_NOW)
            except OSError:  # for another machine, or with a symbol that there is not
                continue
            return True
    return False


def main(path: Path) -> None:
    """Compile all loops; PATH.so or PATH.o appears when it is complete."""
    vars(numba.config)["CPU_FEATURES"] = FEATURES
    native_vector.register("+avx512f" in FEATURES)
    for helper in HELPERS:
        numba.extending.register_jitable(fastmath=FAST, error_model="numpy")(helper)
    whole, *others = [optimised(loop) for loop in loops()]
    for module in others:
        whole.link_in(module)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    code, library = own.with_suffix(".o"), own.with_suffix(".so")
    code.write_bytes(machine().emit_object(whole))
    if link(code, library):
        code.unlink()
        library.replace(path.with_name(f"{path.name}.so"))
    else:
        library.unlink(missing_ok=True)
        code.replace(path.with_name(f"{path.name}.o"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
