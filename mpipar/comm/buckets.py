"""Buckets: many small arrays in one flat buffer, so that they travel as one message.

    capacity 8 MB     w0 5 MB | w1 2 MB     b1 0.1 MB | w2 7 MB     w3 9 MB
                      [---- bucket 0 ---]   [---- bucket 1 ----]    [- 2 -]

Every array is a view of its bucket, so nothing is copied on the way in or out.  Buckets lie in
private memory, or in memory that the ranks of a node share (shared_buckets.py).  Few large messages
cost less than many small ones (one alpha each), several buckets leave something to send while the
rest is still being computed.  Li et al., PyTorch Distributed (VLDB 2020), section 3.2.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import Array, is_device, is_sixteen_bit, module
from mpipar.arrays import dtype as dtype_of
from mpipar.comm.shared_buckets import SharedBuckets
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError, explain

MEGABYTE = 1 << 20


class Item(NamedTuple):
    """An array that needs room in a bucket."""

    shape: tuple[int, ...]
    dtype: np.dtype
    device: str  # "cpu" or "cuda"

    @classmethod
    def like(cls, array: Array) -> "Item":
        """Return the item for an array."""
        return cls(tuple(array.shape), array.dtype, "cuda" if is_device(array) else "cpu")

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def cut(items: Sequence[Item], order: Iterable[int], capacity: float) -> list[list[int]]:
    """Return the numbers of the items of each bucket, filled in the given order.

    A bucket holds items of one dtype and device, and at most `capacity` bytes, or one item.
    Buckets are in the order in which their last items stand.
    """
    open_ones: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    done: list[list[int]] = []
    place = {}
    for position, number in enumerate(order):
        item = items[number]
        kind, place[number] = (item.dtype, item.device), position
        if kind in open_ones and filled[kind] + item.nbytes > capacity:
            done.append(open_ones.pop(kind))
        if kind not in open_ones:
            open_ones[kind], filled[kind] = [], 0
        open_ones[kind].append(number)
        filled[kind] += item.nbytes
    return sorted([*done, *open_ones.values()], key=lambda numbers: place[numbers[-1]])


class Bucket:
    """A flat buffer, and a view of it for each item.

    wire: None, or the 16-bit dtype in which wider numbers travel.
    memory: shared memory for it; what comes back is `results` then, which cannot be written, and
    else it is `views`.
    """

    def __init__(
        self,
        numbers: list[int],
        items: Sequence[Item],
        wire: np.dtype | None = None,
        memory: SharedBuckets | None = None,
    ) -> None:
        kind = items[numbers[0]]
        xp = module(kind.device)
        size = sum(math.prod(items[number].shape) for number in numbers)
        place = None if memory is None else memory.place(size, kind.dtype)
        self.numbers, self.place, self.size = numbers, place, size
        self.buffer: Array = place.buffer if place else xp.empty(size, kind.dtype)
        self.views = _cut(self.buffer, numbers, items)
        self.results = _cut(place.result, numbers, items) if place else self.views
        self.missing = len(numbers)  # items that are not complete on this rank
        self.handle: Any = None  # of the all-reduce in flight
        narrows = wire is not None and kind.dtype.itemsize > 2
        self._wire: Array | None = xp.empty(size, wire) if narrows else None

    @property
    def sixteen_bit(self) -> bool:
        """Whether 16-bit numbers travel."""
        return self._wire is not None or is_sixteen_bit(self.buffer.dtype)

    def outgoing(self) -> Array:
        """Return the flat array that travels, and that the sum comes back in."""
        if self._wire is None:
            return self.buffer
        self._wire[...] = self.buffer
        return self._wire

    def incoming(self, divisor: float) -> None:
        """Take the sum that came back, divided by `divisor`; in shared memory it is complete."""
        if self.place is not None:
            return
        if self._wire is not None:
            self.buffer[...] = self._wire
        if divisor == 1:
            return
        if is_sixteen_bit(self.buffer.dtype):
            self.buffer[...] = self.buffer.astype(np.float32) / np.float32(divisor)
        else:
            self.buffer /= divisor


def _cut(flat: Array, numbers: list[int], items: Sequence[Item]) -> dict[int, Array]:
    """Return a view of a flat array for each item, one behind the other."""
    views: dict[int, Array] = {}
    start = 0
    for number in numbers:
        stop = start + math.prod(items[number].shape)
        views[number] = flat[start:stop].reshape(items[number].shape)
        start = stop
    return views


class Buckets:
    """All buckets, in the one order in which every rank starts them.

    `start_complete` starts a bucket once all its items are complete and the buckets before it are
    started; `reduce` posts its all-reduce and returns the handle.  In shared memory the first step
    starts none before all items are complete: results of another layout may still be read there.
    """

    def __init__(
        self,
        items: Sequence[Item],
        order: Sequence[int],
        capacity: float,
        wire: np.dtype | None,
        reduce: Callable[[Bucket], Any],
        memory: SharedBuckets | None = None,
    ) -> None:
        """Lay the buckets out, in `memory` if there is some."""
        if memory is not None:
            memory.clear()
        self._all = [
            Bucket(numbers, items, wire, memory) for numbers in cut(items, order, capacity)
        ]
        self.order = list(order)
        self.bucket_of = {number: b for b in self._all for number in b.numbers}
        self._reduce = reduce
        self._next = 0
        self._waits = memory is not None

    @property
    def all_started(self) -> bool:
        """Whether no bucket is left to be started."""
        return self._next == len(self._all)

    def start_complete(self) -> None:
        """Start the buckets whose turn it is."""
        while not self._waits and not self.all_started and not self._all[self._next].missing:
            bucket = self._all[self._next]
            self._next += 1
            if bucket.size:
                bucket.handle = self._reduce(bucket)

    def finish(self, divisor: Callable[[Bucket], float]) -> None:
        """Start the rest; wait for all, and divide each by what is left to divide by."""
        for bucket in self._all:
            bucket.missing = 0
        self._waits = False
        self.start_complete()
        for bucket in self._all:
            if bucket.handle is not None:
                bucket.handle.wait()
            bucket.incoming(divisor(bucket))

    def reset(self) -> None:
        """Begin again: nothing is complete."""
        self._next = 0
        for bucket in self._all:
            bucket.handle, bucket.missing = None, len(bucket.numbers)


def check_settings(
    bucket_mb: float, op: str, steps: int, wire_dtype: Any, shared: bool | None = None
) -> None:
    """Raise ConfigError for settings of gradient buckets that cannot work."""
    if shared not in (None, True, False):
        rule = "gradients are reduced in shared memory or by messages"
        raise ConfigError(explain("shared", shared, rule, "Pass True, False, or None to choose"))
    if shared and wire_dtype is not None:
        rule = "in shared memory nothing travels that could be narrowed"
        raise ConfigError(explain("wire_dtype", wire_dtype, rule, "Pass one of the two"))
    if not bucket_mb > 0:
        rule = "a bucket has a positive size, in 2^20 bytes"
        raise ConfigError(explain("bucket_mb", bucket_mb, rule, "Pass 25, or a fraction"))
    if op not in ("mean", "sum"):
        raise ConfigError(explain("op", op, "gradients are added", 'Pass "mean" or "sum"'))
    if steps < 1:
        raise ConfigError(explain("steps", steps, "at least one gradient is added", "Pass 1"))
    if wire_dtype is not None and not is_sixteen_bit(dtype_of(wire_dtype)):
        rule = "gradients travel as they are or in 16 bits"
        fix = 'Pass None, "float16" or "bfloat16"'
        raise ConfigError(explain("wire_dtype", wire_dtype, rule, fix))


def check_gradient(name: str, data: Array, grad: Any) -> None:
    """Raise BufferMismatchError or DtypeMismatchError unless `grad` is like the data."""
    shape = getattr(grad, "shape", None)
    if shape != data.shape:
        rule = f"the gradient of {name} has the parameter's shape, {data.shape}"
        raise BufferMismatchError(explain("grad.shape", shape, rule, "Pass that shape"))
    if grad.dtype != data.dtype:
        rule = f"the gradient of {name} has the parameter's dtype, {data.dtype.name}"
        raise DtypeMismatchError(explain("grad.dtype", grad.dtype.name, rule, "Convert it"))


class Agreement:
    """The question, in flight, whether all ranks of a group have described the same.

    Nobody waits for it before it matters: what depends on the answer asks `others` first.
    """

    def __init__(self, group: Any, described: str) -> None:
        """Collective: ask; 8 bytes from every rank."""
        digest = blake2b(described.encode(), digest_size=8).digest()
        told = np.empty(group.size, np.int64)
        mine = np.frombuffer(digest, np.int64)
        self._handle = group.all_gather(mine, dim=0, out=told, async_op=True)

    def others(self, wait: bool) -> list[int] | None:
        """Return the ranks that described something else than rank 0; None if not known yet."""
        if not wait and not self._handle.test():
            return None
        told = self._handle.wait()
        return np.flatnonzero(told != told[0]).tolist()
