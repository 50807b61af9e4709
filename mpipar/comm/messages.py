"""send, recv and sendrecv between two ranks of a group.

A blocking send is synchronous (MPI_Issend): it returns when the peer has begun to receive, so a
ring of blocking sends never works by luck with small messages and hangs with large ones; the
watchdog names it.  `shift` is the collective for a ring step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import Array, is_device, module
from mpipar.arrays import dtype as dtype_of
from mpipar.comm import buffers, clock
from mpipar.comm.calls import check_rank
from mpipar.comm.device_run import DeviceRequests
from mpipar.comm.flight import Record
from mpipar.comm.group import MESSAGE_TAG, ProcessGroup
from mpipar.comm.handle import Handle
from mpipar.comm.run import Requests
from mpipar.errors import ConfigError, explain
from mpipar.trace import record as trace
from mpipar.trace.record import Label


def send(group: ProcessGroup, x: Any, dst: int | None, async_op: bool) -> Any:
    """Send x to `dst` (default: the next rank of the ring)."""
    begun = clock.begin()
    dst = _peer(group, dst, 1, "dst")
    x = buffers.as_array(x)
    what = f"send({x.dtype.name}, shape {x.shape}, dst={dst})"
    label = Label(f"send to {dst}", x.nbytes, what)
    finish = _finish(group, label, async_op, None)
    if group.lane is not None:
        handle: Requests = _between(group, what, finish, None, (x, dst, not async_op))
    else:
        requests = _post_send(group, x, dst, synchronous=not async_op)
        handle = Requests(requests, group.flight, finish, what)
    group.flight.note(Record(0, what, handle, sends_to=-1 if async_op else dst))
    return _result(group, handle, label, async_op, begun)


def recv(
    group: ProcessGroup, shape: Sequence[int], dtype: Any, src: int | None, async_op: bool
) -> Any:
    """Receive an array of this shape and dtype from `src` (default: the previous of the ring)."""
    begun = clock.begin()
    src = _peer(group, src, -1, "src")
    result = _empty(shape, dtype)
    if group.lane is not None:
        result = module("cuda").empty(result.shape, result.dtype)
    return _receiving(group, None, result, src, async_op, begun)


def sendrecv(
    group: ProcessGroup,
    x: Any,
    dst: int | None,
    shape: Sequence[int] | None,
    dtype: Any,
    src: int | None,
    async_op: bool,
) -> Any:
    """Send x to `dst` and receive from `src` at the same time; the shape defaults to that of x."""
    begun = clock.begin()
    dst, src = _peer(group, dst, 1, "dst"), _peer(group, src, -1, "src")
    x = buffers.as_array(x)
    result = _empty(x.shape if shape is None else shape, x.dtype if dtype is None else dtype)
    if is_device(x):
        result = module("cuda").empty(result.shape, result.dtype)
    return _receiving(group, (x, dst, False), result, src, async_op, begun)


def _empty(shape: Any, dtype: Any) -> np.ndarray:
    """Return the array to receive into."""
    try:
        return buffers.as_array(np.empty(tuple(shape), dtype_of(dtype)), "recv")
    except (TypeError, ValueError, MemoryError) as error:
        rule = f"they must be a shape and a dtype of numbers ({error})"
        raise ConfigError(explain("shape, dtype", (shape, dtype), rule, "Pass both")) from error


def _post_send(
    group: ProcessGroup, x: np.ndarray, dst: int, synchronous: bool
) -> list[MPI.Request]:
    post = group.raw.Issend if synchronous else group.raw.Isend
    data = buffers.flat(x).view(np.uint8)
    return [post(piece, dst, MESSAGE_TAG) for piece in buffers.pieces(data)]


def _receiving(
    group: ProcessGroup,
    sending: tuple[Array, int, bool] | None,
    result: Array,
    src: int,
    async_op: bool,
    begun: clock.Begun,
) -> Any:
    what = f"recv({result.dtype.name}, shape {result.shape}, src={src})"
    label = Label(f"receive from {src}", result.nbytes, what)
    finish = _finish(group, label, async_op, result)
    if group.lane is not None:
        handle: Requests = _between(group, what, finish, (result, src), sending)
        group.flight.note(Record(0, what, handle))
        return _result(group, handle, label, async_op, begun)
    sends = [] if sending is None else _post_send(group, *sending)
    data = result.reshape(-1).view(np.uint8)
    triples = list(buffers.pieces(data))
    receives = [group.raw.Irecv(triple, src, MESSAGE_TAG) for triple in triples]
    expected = [triple[1] for triple in triples]
    handle = Requests(receives + sends, group.flight, finish, what, expected)
    group.flight.note(Record(0, what, handle))
    return _result(group, handle, label, async_op, begun)


def _between(
    group: ProcessGroup,
    what: str,
    finish: Callable[[], Any],
    receiving: tuple[Array, int] | None,
    sending: tuple[Array, int, bool] | None,
) -> DeviceRequests:
    """Queue messages in a group of GPUs behind its earlier ones; return the handle."""
    group.messages += 1
    number = group.messages
    if receiving is not None:
        result, src = receiving
        group.between.receive(result.reshape(-1).view(np.uint8), src, number)
    if sending is not None:
        x, dst, synchronous = sending
        post = group.raw.Issend if synchronous else group.raw.Isend
        group.between.send(buffers.flat(x).view(np.uint8), dst, number, post)
    return DeviceRequests(group.between, number, group.flight, finish, what)


def _finish(group: ProcessGroup, label: Label, async_op: bool, result: Any) -> Callable[[], Any]:
    """Return what a handle does at its end: give the result, and tell a trace."""
    finish = lambda: result  # noqa: E731
    if async_op and trace.to is not None:
        return trace.to.flying(group.flight, label, 0, finish)
    return finish


def _result(
    group: ProcessGroup, handle: Requests, label: Label, async_op: bool, begun: clock.Begun
) -> Any:
    result = Handle(handle, group, label) if async_op else handle.wait()
    group.spent(begun, label, 0)
    return result


def _peer(group: ProcessGroup, peer: int | None, step: int, parameter: str) -> int:
    group.require_alive()
    if peer is None:
        return (group.rank + step) % group.size
    check_rank(group.size, peer, parameter)
    return peer
