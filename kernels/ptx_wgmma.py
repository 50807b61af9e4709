"""Products that a warpgroup, four warps, starts on Hopper's tensor cores and waits for later.

Source: PTX ISA, section 9.7.15 (wgmma).  A (64 x 16) and B (16 x width) are read from shared memory
where a descriptor of 64 bits says; sums stay in registers, width / 2 a thread: thread t of 128 has

    sums 4 j + 0, 1: row 16 (t / 32) + t % 32 / 4, columns 8 j + 2 (t % 4), + 1
    sums 4 j + 2, 3: row + 8

An operand lies in rows of 128 bytes, 64 elements, whose eight pieces of 16 bytes are swizzled:
piece p of row r is at p ^ (r % 8).  Its rows run along k, or across it (along m or n).

    bits 0..13    first byte / 16                                  address of row 0, piece 0
    bits 16..29   stride / 16 from 64 elements of m or n to the next      if rows run across k
    bits 32..45   stride / 16 from 8 rows to the next
    bits 62..63   1: swizzled in rows of 128 bytes

In the simulator the 128 threads meet, and kernels/wgmma_model.py computes for them.
"""

import functools
import threading
from typing import Any

import numpy as np

from mpipar.kernels.ptx import instruction
from mpipar.kernels.ptx_mma import copies_under_way, together

WARPGROUP = 128
ROWS, DEPTH = 64, 16  # of A in one instruction, and of its steps along k
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def _model() -> Any:
    """Return this block's shared memory of the simulator, as tensor cores see it."""
    from mpipar.kernels.wgmma_model import Memory

    manager: Any = vars(threading.current_thread())["_manager"]
    found = vars(manager).get("wgmma")
    return found or vars(manager).setdefault("wgmma", Memory())


@instruction("cvt.u64.u32 $0, $1;", "=l,r", gives="int64", takes="uint32")
def number(place: Any) -> Any:
    """Return an address in shared memory as a number, for descriptors."""
    array, index = place
    return _model().place(array, index)


@instruction("fence.proxy.async.shared::cta;", "", memory=True)
def fence_shared() -> None:
    """Let tensor cores see what this thread has written to shared memory."""
    threading.current_thread().__dict__["fenced"] = True


def _all(act: Any) -> None:
    """Let one thread of a warpgroup act when all are here."""
    group = vars(threading.current_thread())["thread_id"] // WARPGROUP
    together(None, lambda given: act(group) or given, WARPGROUP)


@instruction("wgmma.fence.sync.aligned;", "", memory=True, warp=True)
def begin_products() -> None:
    """Let products that are started after this one use registers written before."""


@instruction("wgmma.commit_group.sync.aligned;", "", memory=True, warp=True)
def commit_products() -> None:
    """End a group of products."""
    _all(_model().commit)


@instruction("wgmma.wait_group.sync.aligned 1;", "", memory=True, warp=True)
def wait_products() -> None:
    """Wait for this warpgroup's products, except those of the last group that has ended."""
    _all(lambda group: _model().wait(group, 1))


@functools.cache
def wgmma(width: int, kind: str, a_across: bool, b_across: bool) -> Any:
    """Return the instruction that starts sums += A B: (sums, descriptor of A, of B) -> sums.

    The sums must not be touched before they are waited for, but by more products.
    """
    count = width // 2
    sums = ", ".join(f"${n}" for n in range(count))
    text = (
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned."
        f"m64n{width}k16.f32.{KINDS[kind]}.{KINDS[kind]} {{{sums}}}, ${2 * count}, "
        f"${2 * count + 1}, add, 1, 1, {a_across:d}, {b_across:d}; }}"
    )
    types = f"float32*{count}"

    @instruction(
        text, f"{_tied(count)},l,l", gives=types, takes=f"{types} int64 int64", memory=True,
        warp=True,
    )  # fmt: skip
    def start(held: Any, a: Any, b: Any) -> Any:
        thread, layout = vars(threading.current_thread()), (a_across, b_across)
        group, fenced = thread["thread_id"] // WARPGROUP, thread["fenced"]
        given = (held, int(a), int(b), fenced)
        model = _model()
        return together(given, lambda all_: model.start(group, all_, kind, *layout), WARPGROUP)

    return start


@functools.cache
def zeros(width: int) -> Any:
    """Return the instruction that gives sums of nothing."""
    count = width // 2
    text = " ".join(f"mov.f32 ${n}, 0f00000000;" for n in range(count))
    how: Any = {"gives": f"float32*{count}"}
    return instruction(text, ",".join(["=f"] * count), **how)(lambda: np.zeros(count, np.float32))


@functools.cache
def finished(width: int) -> Any:
    """Return the instruction that waits for all products of this warpgroup: sums -> sums."""
    count = width // 2
    types = f"float32*{count}"

    @instruction(
        "wgmma.wait_group.sync.aligned 0;", _tied(count), gives=types, takes=types, memory=True,
        warp=True,
    )  # fmt: skip
    def wait(held: Any) -> Any:
        _all(lambda group: _model().wait(group, 0))
        return held

    return wait


@functools.cache
def keep(width: int, pitch: int) -> Any:
    """Return the instruction that writes sums to shared memory: (address of the first, sums).

    Rows there are `pitch` numbers long.
    """
    count = width // 2
    pairs = [((n // 4) * 8 + (n // 2 % 2) * 8 * pitch, n) for n in range(0, count, 2)]
    text = " ".join(f"st.shared.v2.f32 [$0+{4 * at}], {{${n + 1}, ${n + 2}}};" for at, n in pairs)
    constraints = ",".join(["r"] + ["f"] * count)

    @instruction(text, constraints, takes=f"uint32 float32*{count}", memory=True)
    def write(place: Any, held: Any) -> None:
        array, index = place
        assert not any(copies_under_way())  # they could land on the sums
        for at, n in pairs:
            array[index + at : index + at + 2] = held[n : n + 2]

    return write


def _tied(count: int) -> str:
    """Return constraints of results that begin as the first arguments."""
    return ",".join(["=f"] * count + [str(n) for n in range(count)])
