"""Single instructions of the GPU that Numba has no name for, written in PTX, NVIDIA's assembly.

Source: PTX ISA, section 9.  An Instruction is a function that kernels call.  In the simulator a
Python function takes its place; an address is then (array, index).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.arrays import dtype
from mpipar.kernels.device import Deferred, simulated


class Instruction(Deferred):
    """An instruction: its PTX, LLVM's constraints, the types of its results and arguments.

    `gives` and `takes` list NumPy's names of types, "float32*64" for a tuple of 64; several results
    come as a tuple.  `memory` says that it reads or writes memory, so that the compiler keeps its
    place among others that do, and `warp` that all threads of a warp run it together.
    """

    def __init__(
        self, python: Callable[..., Any], text: str, constraints: str, gives: str, takes: str,
        memory: bool, warp: bool,
    ) -> None:  # fmt: skip
        self.python, self.text, self.memory, self.warp = python, text, memory, warp
        self.constraints = ",".join([constraints] * bool(constraints) + ["~{memory}"] * memory)
        self.gives, self.takes = gives.split(), takes.split()
        self._made: Any = None

    def resolve(self) -> Any:
        """Return Numba's intrinsic; in the simulator the Python function."""
        if simulated():
            return self.python
        if self._made is None:
            from mpipar.kernels.ptx_build import intrinsic

            self._made = intrinsic(self)
        return self._made

    def __call__(self, *arguments: Any) -> Any:
        """Run it as Python."""
        return self.python(*arguments)


def instruction(
    text: str, constraints: str, *, gives: str = "", takes: str = "", memory: bool = False,
    warp: bool = False,
) -> Callable[[Callable[..., Any]], Any]:  # fmt: skip
    """Make an Instruction; the decorated function is what the simulator runs (a decorator)."""
    return lambda python: Instruction(python, text, constraints, gives, takes, memory, warp)


class Address(Deferred):
    """The address of an array's element: 64 bits, or 32 bits in shared memory."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self._made: Any = None

    def resolve(self) -> Any:
        """Return Numba's intrinsic; in the simulator a pair."""
        if simulated():
            return lambda array, index: (array, int(index))
        if self._made is None:
            from mpipar.kernels.ptx_build import address_of

            self._made = address_of(self.shared)
        return self._made

    def __call__(self, array: Any, index: Any) -> Any:
        """Return the pair."""
        return (array, int(index))


address: Any = Address(shared=False)
shared_address: Any = Address(shared=True)


def _words(place: tuple[Any, int], count: int) -> Any:
    """Return `count` 32-bit words at an address of the simulator, as a view."""
    array, index = place
    step = 4 // array.dtype.itemsize if array.dtype.itemsize < 4 else 1
    return array.reshape(-1)[index : index + count * step].view(np.uint32)


@instruction(
    "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l",
    gives="uint32 uint32 uint32 uint32", takes="uint64", memory=True,
)  # fmt: skip
def load4(place: Any) -> tuple[Any, ...]:
    """Read 16 bytes of global memory, at an address that is a multiple of 16."""
    return tuple(_words(place, 4))


@instruction(
    "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r",
    takes="uint64 uint32 uint32 uint32 uint32", memory=True,
)  # fmt: skip
def store4(place: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Write 16 bytes of global memory, at an address that is a multiple of 16."""
    _words(place, 4)[:] = (a, b, c, d)


class Quad(Deferred):
    """Four neighbouring elements of an array at an address that is a multiple of their size."""

    def __init__(self) -> None:
        self._made: Any = None

    def resolve(self) -> Any:
        """Return Numba's intrinsic, which reads 16 bytes at a time; in the simulator a slice."""
        if simulated():
            return self
        if self._made is None:
            from mpipar.kernels.ptx_build import quad_of

            self._made = quad_of()
        return self._made

    def __call__(self, array: Any, index: Any) -> Any:
        """Return the four."""
        return tuple(array[index : index + 4])


quad: Any = Quad()


def _halves(word: Any, kind: str) -> tuple[Any, ...]:
    return tuple(np.array([word], np.uint32).view(dtype(kind)).astype(np.float32))


def _word(low: Any, high: Any, kind: str) -> Any:
    return np.array([low, high], np.float32).astype(dtype(kind)).view(np.uint32)[0]


@instruction(
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r",
    gives="float32 float32", takes="uint32",
)  # fmt: skip
def split_bf16(word: Any) -> tuple[Any, ...]:
    """Return two bfloat16 in float32, that of the low half first."""
    return _halves(word, "bfloat16")


@instruction(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }", "=f,=f,r",
    gives="float32 float32", takes="uint32",
)  # fmt: skip
def split_f16(word: Any) -> tuple[Any, ...]:
    """Return two float16 in float32, that of the low half first."""
    return _halves(word, "float16")


@instruction(
    "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", gives="uint32", takes="float32 float32"
)  # fmt: skip
def join_bf16(low: Any, high: Any) -> Any:
    """Return two numbers as bfloat16, rounded to nearest even."""
    return _word(low, high, "bfloat16")


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", gives="uint32", takes="float32 float32")
def join_f16(low: Any, high: Any) -> Any:
    """Return two numbers as float16, rounded to nearest even."""
    return _word(low, high, "float16")
