"""What descriptors and wgmma mean, on NumPy arrays: for the simulator and for tests.

Source: PTX ISA, section 9.7.15.5 (matrix descriptors, canonical layouts, swizzling).  Byte address
of element (i, k) of an operand, i along m or n, before swizzling, in rows of 128 bytes:

    rows along k     start + i / 8 * stride + i % 8 * 128 + 2 k
    rows across k    start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2

Swizzling exchanges pieces of 16 bytes: bits 4..6 of an address become their xor with bits 7..9.
"""

from typing import Any

import numpy as np

from mpipar.arrays import dtype

ORIGIN = 1024  # where shared memory begins
DEPTH = 16


def addresses(descriptor: int, count: int, across: bool) -> np.ndarray:
    """Return the addresses of an operand's elements, (count, 16)."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    assert descriptor >> 62 == 1  # swizzled in rows of 128 bytes
    assert (descriptor >> 49) & 7 == (start >> 7) & 7 == 0  # it begins with row 0 of eight
    i, k = np.arange(count)[:, None], np.arange(DEPTH)
    if across:
        plain = start + i // 64 * leading + k // 8 * stride + k % 8 * 128 + i % 64 * 2
    else:
        plain = start + i // 8 * stride + i % 8 * 128 + 2 * k
    return plain ^ ((plain >> 7 & 7) << 4)


def spread(sums: np.ndarray) -> np.ndarray:
    """Return (64, width) sums as the threads of a warpgroup hold them, (128, width / 2)."""
    parts = sums.reshape(4, 2, 8, -1, 4, 2)  # warp, upper or lower 8, row, 8 columns, pair, column
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(128, -1)


class Memory:
    """The shared memory of a block, and what its warpgroups have started on it.

    Operands are read when a product starts, and must be the same when it is waited for.
    """

    def __init__(self) -> None:
        self.bytes: Any = None
        self.open: dict[int, list[Any]] = {}  # by warpgroup: products that are in no group yet
        self.groups: dict[int, list[list[Any]]] = {}

    def place(self, array: Any, index: int) -> int:
        """Return the address of an element of the array that is all dynamic shared memory."""
        self.bytes = array.reshape(-1).view(np.uint8)
        return ORIGIN + index * int(array.dtype.itemsize)

    def read(self, where: np.ndarray, kind: str) -> np.ndarray:
        """Return elements of 16 bits at these addresses."""
        return np.asarray(self.bytes.view(dtype(kind))[(where - ORIGIN) // 2])

    def start(
        self, group: int, given: list[Any], kind: str, a_across: bool, b_across: bool
    ) -> np.ndarray:
        """Return the sums of all threads of a warpgroup, those that they gave and A B."""
        held = np.array([one[0] for one in given])
        assert len({one[1:3] for one in given}) == 1  # all threads give the same descriptors
        assert all(one[3] for one in given)  # copies that have landed need a fence
        _, a, b, _ = given[0]
        places = addresses(a, 64, a_across), addresses(b, 2 * held.shape[1], b_across)
        left, right = (self.read(where, kind) for where in places)
        read = [(where, kind, x) for where, x in zip(places, (left, right), strict=True)]
        self.open.setdefault(group, []).extend(read)
        return held + spread(left.astype(np.float32) @ right.astype(np.float32).T)

    def commit(self, group: int) -> None:
        """End a group of products."""
        self.groups.setdefault(group, []).append(self.open.pop(group, []))

    def wait(self, group: int, pending: int) -> None:
        """Finish all groups of products but some."""
        groups = self.groups.setdefault(group, [])
        while len(groups) > pending:
            for where, kind, x in groups.pop(0):
                same = self.read(where, kind).view(np.uint16) == x.view(np.uint16)
                assert same.all(), "operands were written to too early"
