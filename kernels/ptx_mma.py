"""Instructions of tensor cores, and copies that go on while a kernel computes.

Source: PTX ISA, sections 9.7.14 (mma, ldmatrix) and 9.7.9 (cp.async).  A 16-bit word of a fragment
is half of a uint32.  In a fragment lane l of a warp has row l / 4 and columns 2 (l % 4), + 1:

    A 16 x 16, words a0..a3: as above, rows + 8, columns + 8, both
    B 16 x 8, words b0 b1: column l / 4, rows 2 (l % 4), + 1, and those + 8
    C 16 x 8, numbers c0 c1: as above;  c2 c3: rows + 8

In the simulator the lanes of a warp meet at a barrier, where one of them computes for all; copies
are made when they are waited for, not before.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar.arrays import dtype
from mpipar.kernels.ptx import instruction

LANES = 32
FOUR = "uint32 uint32 uint32 uint32"
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
HOW: Any = {
    "constraints": "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
    "gives": "float32 float32 float32 float32",
    "takes": f"{FOUR} uint32 uint32 float32 float32 float32 float32",
    "warp": True,
}


class Warp:
    """Threads of the simulator that compute something together: 32, or 128 of a warpgroup."""

    def __init__(self, lanes: int) -> None:
        self.given: list[Any] = [None] * lanes
        self.found: Any = None
        self.compute: Callable[[list[Any]], Any] = list
        self.barrier = threading.Barrier(lanes, self._meet, timeout=60)

    def _meet(self) -> None:
        self.found = self.compute(self.given)

    def together(self, lane: int, given: Any, compute: Callable[[list[Any]], Any]) -> Any:
        """Return this lane's part of what `compute` makes of what all lanes give."""
        self.given[lane], self.compute = given, compute
        self.barrier.wait()
        return self.found[lane]


def together(given: Any, compute: Callable[[list[Any]], Any], lanes: int = LANES) -> Any:
    """Meet the other lanes of this thread's warp, or of its warpgroup."""
    thread: Any = threading.current_thread()
    warps = thread._manager.__dict__.setdefault("warps", {})
    key = lanes, thread.thread_id // lanes
    warp = warps.get(key)
    if warp is None:  # setdefault alone is atomic
        warp = warps.setdefault(key, Warp(lanes))
    return warp.together(thread.thread_id % lanes, given, compute)


def product(given: list[Any], kind: str) -> list[tuple[Any, ...]]:
    """Return every lane's c0..c3 + A B, from (a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) of each."""
    words = np.array([one[:6] for one in given], np.uint32).view(dtype(kind)).astype(np.float32)
    pairs = words.reshape(8, 4, 6, 2)  # lane / 4, lane % 4, word, half
    a, b = np.empty((2, 8, 2, 8), np.float32), np.empty((2, 8, 8), np.float32)
    for word in range(4):
        a[word % 2, :, word // 2] = pairs[:, :, word].reshape(8, 8)
    for word in range(2):
        b[word] = pairs[:, :, 4 + word].reshape(8, 8).T
    sums = a.reshape(16, 16) @ b.reshape(16, 8)
    lanes = sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(LANES, 4)
    return [tuple(lanes[n] + np.array(one[6:], np.float32)) for n, one in enumerate(given)]


@instruction(MMA.format("bf16"), **HOW)
def mma_bf16(*fragments: Any) -> Any:
    """Return c + A B of bfloat16, sums in float32."""
    return together(fragments, lambda given: product(given, "bfloat16"))


@instruction(MMA.format("f16"), **HOW)
def mma_f16(*fragments: Any) -> Any:
    """Return c + A B of float16, sums in float32."""
    return together(fragments, lambda given: product(given, "float16"))


def matrices(given: list[Any], turned: bool) -> list[tuple[Any, ...]]:
    """Return every lane's words of four 8 x 8 matrices; lane 8 i + j gives row j of matrix i."""
    rows = np.array([array.reshape(-1)[at : at + 8].view(np.uint16) for array, at in given])
    four = rows.reshape(4, 8, 8)
    four = four.transpose(0, 2, 1) if turned else four
    words = np.ascontiguousarray(four).reshape(4, LANES, 2).view(np.uint32)[..., 0]
    return [tuple(one) for one in words.T]


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r",
    gives=FOUR, takes="uint32", memory=True, warp=True,
)  # fmt: skip
def ldmatrix(row: Any) -> Any:
    """Read four 8 x 8 matrices: a lane gets row l / 4, columns 2 (l % 4), + 1 of each."""
    return together(row, lambda given: matrices(given, False))


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r",
    gives=FOUR, takes="uint32", memory=True, warp=True,
)  # fmt: skip
def ldmatrix_turned(row: Any) -> Any:
    """Read four 8 x 8 matrices, transposed."""
    return together(row, lambda given: matrices(given, True))


def copies_under_way() -> list[list[Any]]:
    """Return this thread's groups of copies under way; the last one is not complete."""
    groups: list[list[Any]] = threading.current_thread().__dict__.setdefault("copies", [[]])
    return groups


@instruction(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r",
    takes="uint32 uint64 int32", memory=True,
)  # fmt: skip
def copy16(target: Any, source: Any, size: Any) -> None:
    """Start to copy `size` bytes from global to shared memory, and zeros up to 16."""
    copies_under_way()[-1].append((target, source, int(size)))


@instruction("cp.async.commit_group;", "", memory=True)
def commit_copies() -> None:
    """End a group of copies."""
    copies_under_way().append([])


@instruction("cp.async.wait_group 1;", "", memory=True)
def wait_copies() -> None:
    """Wait for this thread's copies, except those of the last group that has ended."""
    groups = copies_under_way()
    threading.current_thread().__dict__["fenced"] = False  # see ptx_wgmma.py
    while len(groups) > 2:
        for (to, at), (array, first), size in groups.pop(0):
            item = array.dtype.itemsize
            assert at * item % 16 == 0
            assert size == 0 or first * item % 16 == 0
            count = size // item
            flat = to.reshape(-1)
            flat[at : at + 16 // item] = 0
            flat[at : at + count] = array.reshape(-1)[first : first + count]
