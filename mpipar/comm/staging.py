"""Messages of device memory: pieces that wait for their stream, and pieces that are copied.

A `Transfers` keeps, for each peer, a queue of pieces that leave and one of pieces that arrive, each
in the order of its messages, and keeps WINDOW of them going.  Nothing waits: `advance` asks events
and requests, and posts what is ready.

    staged, leaving     copy 0 │ copy 1 │ copy 2       on the stream DOWN, after what wrote them
                               └ send 0 └ send 1       once the copy's event has passed
    staged, arriving    receive 0 │ receive 1          in pinned memory
                                  └ copy 0 └ copy 1    on the stream UP; the caller's stream waits
    direct              the caller's stream has passed ─ send, receive

Cost of n bytes staged: n at the rate of the slowest of copy and network, and one piece more.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import Array, is_device, module
from mpipar.comm.device import PIECE_BYTES, Lane
from mpipar.errors import BufferMismatchError

WINDOW = 4  # pieces to or from one peer that are under way at a time
TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind


class Pinned:
    """Pieces of pinned host memory, used again and again; page-locking one takes milliseconds."""

    def __init__(self) -> None:
        self._free: deque[tuple[Any, np.ndarray]] = deque()

    def take(self) -> np.ndarray:
        """Return PIECE_BYTES bytes that no copy uses any more."""
        if self._free and (self._free[0][0] is None or self._free[0][0].query()):
            return self._free.popleft()[1]
        memory = module("cuda").cuda.alloc_pinned_memory(PIECE_BYTES)
        return np.frombuffer(memory, np.uint8, PIECE_BYTES)

    def give_back(self, piece: np.ndarray, after: Any = None) -> None:
        """Take a piece back, free once the event `after` has passed."""
        self._free.append((after, piece))


class Side:
    """The streams of the copies of one GPU, down and up, and its pinned memory."""

    def __init__(self) -> None:
        stream = module("cuda").cuda.Stream
        self.down, self.up = stream(non_blocking=True), stream(non_blocking=True)
        self.pinned = Pinned()


@functools.cache
def side(gpu: int) -> Side:
    """Return the side streams of a GPU."""
    return Side()


class Piece:
    """A run of bytes on its way: `buffer` is what MPI is given, once `event` has passed."""

    __slots__ = (
        "buffer",
        "event",
        "number",
        "part",
        "pinned",
        "post",
        "request",
        "status",
        "stream",
    )

    def __init__(self, part: Array, number: int, post: Callable, stream: Any) -> None:
        self.part, self.number, self.post, self.stream = part, number, post, stream
        self.buffer: Any = part
        self.pinned: np.ndarray | None = None
        self.event: Any = None
        self.request: Any = None
        self.status = MPI.Status()

    def passed(self) -> bool:
        """Say whether the device has done what must precede the message."""
        return self.event is None or bool(self.event.query())


class Transfers:
    """Messages under one tag; their arrays are used on the stream that is current when queued."""

    def __init__(self, comm: MPI.Comm, tag: int, lane: Lane) -> None:
        cuda = module("cuda").cuda
        self._comm, self._tag, self._lane = comm, tag, lane
        self._side = side(cuda.runtime.getDevice())
        self._event = functools.partial(cuda.Event, disable_timing=True)
        self._copy = cuda.runtime.memcpyAsync
        self._current = cuda.get_current_stream
        self._leaving: dict[int, deque[Piece]] = {}
        self._arriving: dict[int, deque[Piece]] = {}

    def send(self, data: Array, peer: int, number: int, post: Callable) -> None:
        """Queue the bytes of a contiguous uint8 array, for `post`: Isend or Issend.

        `number` is that of its round or message, never lower than the one before.
        """
        self._queue(self._leaving, data, peer, number, post)

    def receive(self, data: Array, peer: int, number: int) -> None:
        """Queue the receipt of bytes."""
        self._queue(self._arriving, data, peer, number, self._comm.Irecv)

    @property
    def froms(self) -> list[int]:
        """The ranks from which something is still to come."""
        return sorted(self._arriving)

    def arrived(self, last: int) -> bool:
        """Advance; say whether what was to be received up to number `last` is in its place.

        It is for work that the stream gets from now on.

        Raises BufferMismatchError if another number of bytes came, MPI.Exception.
        """
        self._advance_leaving()
        for peer, queue in tuple(self._arriving.items()):
            self._keep_receiving(queue, peer)
            while queue and queue[0].request is not None and self._came(queue[0], peer):
                self._land(queue.popleft())
                self._keep_receiving(queue, peer)
            if not queue:
                del self._arriving[peer]
        return all(queue[0].number > last for queue in self._arriving.values())

    def sent(self, last: int) -> bool:
        """Advance; say whether the messages up to number `last` have left."""
        self._advance_leaving()
        return all(queue[0].number > last for queue in self._leaving.values())

    # -- pieces ----------------------------------------------------------------------------------

    def _queue(
        self, queues: dict[int, deque[Piece]], data: Array, peer: int, number: int, post: Callable
    ) -> None:
        step, stream = self._lane.piece_bytes, self._current()
        queue = queues.setdefault(peer, deque())
        for start in range(0, data.size or 1, step):
            queue.append(Piece(data[start : start + step], number, post, stream))

    def _advance_leaving(self) -> None:
        for peer, queue in tuple(self._leaving.items()):
            while queue:
                for piece in tuple(queue)[:WINDOW]:  # copies run ahead of the messages
                    if piece.event is None:
                        self._leave(piece)
                    if piece.request is None:
                        if not piece.passed():
                            break  # messages keep their order
                        triple = [piece.buffer, piece.buffer.size, MPI.BYTE]
                        piece.request = piece.post(triple, peer, self._tag)
                if queue[0].request is None or not queue[0].request.Test():
                    break
                done = queue.popleft()
                if done.pinned is not None:
                    self._side.pinned.give_back(done.pinned)
            if not queue:
                del self._leaving[peer]

    def _leave(self, piece: Piece) -> None:
        """The one place where device memory leaves for MPI: what writes it must have passed."""
        if not is_device(piece.part) or not piece.part.size:
            piece.buffer = np.empty(0, np.uint8) if not piece.part.size else piece.part
            return
        piece.event = self._event()
        if self._lane.direct:
            piece.event.record(piece.stream)
            return
        down, size = self._side.down, piece.part.size
        written = self._event()
        written.record(piece.stream)
        down.wait_event(written)
        piece.pinned = self._side.pinned.take()
        piece.buffer = piece.pinned[:size]
        self._copy(piece.pinned.ctypes.data, piece.part.data.ptr, size, TO_HOST, down.ptr)
        piece.event.record(down)

    def _keep_receiving(self, queue: deque[Piece], peer: int) -> None:
        for piece in tuple(queue)[:WINDOW]:
            if piece.request is not None:
                continue
            if piece.event is None and piece.pinned is None:
                self._make_room(piece)
            if not piece.passed():
                return
            triple = [piece.buffer, piece.buffer.size, MPI.BYTE]
            piece.request = piece.post(triple, peer, self._tag)

    def _make_room(self, piece: Piece) -> None:
        """Say where a piece is received: in place, once nothing uses that, or in pinned memory."""
        if not is_device(piece.part) or not piece.part.size:
            piece.buffer = np.empty(0, np.uint8) if not piece.part.size else piece.part
        elif self._lane.direct:
            piece.event = self._event()
            piece.event.record(piece.stream)
        else:
            piece.pinned = self._side.pinned.take()
            piece.buffer = piece.pinned[: piece.part.size]

    def _came(self, piece: Piece, peer: int) -> bool:
        if not piece.request.Test(piece.status):
            return False
        if piece.status.count != piece.part.size:
            raise BufferMismatchError(
                f"rank {peer} sent {piece.status.count} bytes where {piece.part.size} were expected"
            )
        return True

    def _land(self, piece: Piece) -> None:
        """Bring a piece that came to the device; the caller's stream waits for it."""
        if piece.pinned is None:
            return
        up, used, there = self._side.up, self._event(), self._event()
        used.record(piece.stream)
        up.wait_event(used)
        size = piece.part.size
        self._copy(piece.part.data.ptr, piece.pinned.ctypes.data, size, TO_DEVICE, up.ptr)
        there.record(up)
        piece.stream.wait_event(there)
        self._side.pinned.give_back(piece.pinned, there)
