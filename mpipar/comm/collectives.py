"""What each collective means for arrays: its blocks, its input, its output.

Every function validates, states the call, lays out the input as blocks one behind the other, and
hands over to `ProcessGroup.start`.  p ranks in the group, r this rank.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpipar.arrays import dtype as dtype_of
from mpipar.comm.binding import axis, is_outermost, pack, unpack, with_size
from mpipar.comm.buffers import as_array, flat, result_array
from mpipar.comm.check import checking
from mpipar.comm.group import Call, ProcessGroup, UserOp
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.partition import blocks

Sizes = Sequence[int] | str | None
EMPTY = np.empty(0, np.uint8)
_PREDEFINED = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
HEADER = 16  # int64: dtype number, dimensions, whether a Tensor, shape
_HEADER_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)


class Announced(NamedTuple):
    """What the source of a broadcast or scatter tells before the data."""

    shape: tuple[int, ...]
    dtype: np.dtype
    differentiable: bool


def all_reduce(
    group: ProcessGroup, x: Any, op: Any, out: Any, algorithm: str | None, async_op: bool
) -> Any:
    """Every rank gets the reduction of all ranks' x."""
    with checking(group, "all_reduce") as agreed:
        x = as_array(x)
        result = result_array(out, x.shape, x.dtype)
        call = Call("all_reduce", algorithm or group.algorithm, _op(op), x.dtype, (x.size,))
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, op={_op(op)}, algorithm={call.algorithm}")
            group.validate(call)
    return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)


def reduce(
    group: ProcessGroup, x: Any, dst: int, op: Any, algorithm: str | None, async_op: bool
) -> Any:
    """The rank `dst` gets the reduction of all ranks' x; the others get None."""
    with checking(group, "reduce") as agreed:
        x = as_array(x)
        _rank(group, dst, "dst")
        call = Call("reduce", algorithm or group.algorithm, _op(op), x.dtype, (x.size,), dst)
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, op={_op(op)}, dst={dst}")
            group.validate(call)
    if group.rank != dst:
        return group.start(call, flat(x), np.empty(0, x.dtype), lambda: None, async_op)
    result = np.empty(x.shape, x.dtype)
    return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)


def reduce_scatter(
    group: ProcessGroup,
    x: Any,
    dim: int,
    op: Any,
    sizes: Sequence[int] | None,
    out: Any,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """Every rank gets its block along `dim` of the reduction of all ranks' x."""
    with checking(group, "reduce_scatter") as agreed:
        x = as_array(x)
        dim = axis(dim, x.ndim)
        cut = tuple(sizes) if sizes is not None else blocks(x.shape[dim], group.size)
        _sizes(group, cut, x.shape[dim])
        result = result_array(out, with_size(x.shape, dim, cut[group.rank]), x.dtype)
        rest = _rest(x.shape, dim)
        counts = tuple(size * rest for size in cut)
        call = Call("reduce_scatter", algorithm or group.algorithm, _op(op), x.dtype, counts)
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, dim={dim}, sizes={cut}, op={_op(op)}")
            group.validate(call)
    return group.start(call, pack(x, dim, cut), result.reshape(-1), lambda: result, async_op)


def all_gather(
    group: ProcessGroup,
    x: Any,
    dim: int,
    sizes: Sizes,
    out: Any,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """Every rank gets all ranks' x, joined along `dim`."""
    with checking(group, "all_gather") as agreed:
        x = as_array(x)
        dim = axis(dim, x.ndim)
        if agreed.wanted:
            loose = x.shape if sizes is None else (*x.shape[:dim], "*", *x.shape[dim + 1 :])
            agreed.on(x.dtype, f"shape {loose}, dim={dim}, sizes={sizes}")
    cut = gathered_sizes(group, x.shape[dim], sizes)
    with checking(group, "all_gather") as agreed:
        _own(group, cut, x.shape[dim])
        shape = with_size(x.shape, dim, sum(cut))
        result = result_array(out, shape, x.dtype)
        rest = _rest(x.shape, dim)
        counts = tuple(size * rest for size in cut)
        call = Call("all_gather", algorithm or group.algorithm, None, x.dtype, counts)
        if agreed.wanted:
            agreed.on(x.dtype, f"{counts}")
            group.validate(call)
    if is_outermost(shape, dim):
        return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)
    packed = np.empty(result.size, x.dtype)

    def finish() -> np.ndarray:
        unpack(packed, result, dim, cut)
        return result

    return group.start(call, flat(x), packed, finish, async_op)


def gather(
    group: ProcessGroup, x: Any, dst: int, dim: int, algorithm: str | None, async_op: bool
) -> Any:
    """The rank `dst` gets all ranks' x, joined along `dim`; the others get None."""
    with checking(group, "gather") as agreed:
        x = as_array(x)
        dim = axis(dim, x.ndim)
        _rank(group, dst, "dst")
        if agreed.wanted:
            loose = (*x.shape[:dim], "*", *x.shape[dim + 1 :])
            agreed.on(x.dtype, f"shape {loose}, dim={dim}, dst={dst}")
    cut = gathered_sizes(group, x.shape[dim], "exchange")
    rest = _rest(x.shape, dim)
    counts = tuple(size * rest for size in cut)
    call = Call("gather", algorithm or group.algorithm, None, x.dtype, counts, dst)
    if group.rank != dst:
        return group.start(call, flat(x), np.empty(0, x.dtype), lambda: None, async_op)
    result = np.empty(with_size(x.shape, dim, sum(cut)), x.dtype)
    packed = (
        result.reshape(-1) if is_outermost(result.shape, dim) else np.empty_like(result).reshape(-1)
    )

    def finish() -> np.ndarray:
        if packed.base is not result:
            unpack(packed, result, dim, cut)
        return result

    return group.start(call, flat(x), packed, finish, async_op)


def broadcast(
    group: ProcessGroup,
    x: np.ndarray | None,
    kind: Announced,
    src: int,
    out: Any,
    algorithm: str | None,
    async_op: bool,
) -> Any:
    """Every rank gets the x of `src`, whose shape and dtype were announced."""
    with checking(group, "broadcast"):
        result = result_array(out, kind.shape, kind.dtype)
    count = math.prod(kind.shape)
    call = Call("broadcast", algorithm or group.algorithm, None, kind.dtype, (count,), src)
    source = flat(as_array(x)) if group.rank == src else np.empty(0, kind.dtype)
    return group.start(call, source, result.reshape(-1), lambda: result, async_op)


def scatter(
    group: ProcessGroup,
    x: np.ndarray | None,
    kind: Announced,
    src: int,
    dim: int,
    algorithm: str | None,
    async_op: bool,
    sizes: Sequence[int] | None = None,
) -> Any:
    """Every rank gets its block of the x of `src`, cut along `dim` (by `sizes` if given)."""
    with checking(group, "scatter"):
        dim = axis(dim, len(kind.shape))
        cut = tuple(sizes) if sizes is not None else blocks(kind.shape[dim], group.size)
        _sizes(group, cut, kind.shape[dim])
    rest = _rest(kind.shape, dim)
    counts = tuple(size * rest for size in cut)
    call = Call("scatter", algorithm or group.algorithm, None, kind.dtype, counts, src)
    result = np.empty(with_size(kind.shape, dim, cut[group.rank]), kind.dtype)
    source = pack(as_array(x), dim, cut) if group.rank == src else np.empty(0, kind.dtype)
    return group.start(call, source, result.reshape(-1), lambda: result, async_op)


def all_to_all(
    group: ProcessGroup,
    x: Any,
    scatter_dim: int,
    gather_dim: int,
    sizes: Sizes,
    algorithm: str | None,
    async_op: bool,
    scatter_sizes: Sequence[int] | None = None,
) -> Any:
    """Trade a cut along `gather_dim` for a cut along `scatter_dim`.

    Rank r sends block j of its `scatter_dim` to rank j, and joins what it gets along `gather_dim`.
    `scatter_sizes` cuts by other sizes than partition.blocks.
    """
    with checking(group, "all_to_all") as agreed:
        x = as_array(x)
        scatter_dim = axis(scatter_dim, x.ndim, "scatter_dim")
        gather_dim = axis(gather_dim, x.ndim, "gather_dim")
        if scatter_dim == gather_dim:
            raise ConfigError(
                explain("gather_dim", gather_dim, "it differs from scatter_dim", "Choose two")
            )
        if agreed.wanted:
            loose: tuple = x.shape
            if sizes is not None:
                loose = (*x.shape[:gather_dim], "*", *x.shape[gather_dim + 1 :])
            agreed.on(x.dtype, f"shape {loose}, scatter_dim={scatter_dim}, gather_dim={gather_dim}")
    gathered = gathered_sizes(group, x.shape[gather_dim], sizes)
    with checking(group, "all_to_all") as agreed:
        _own(group, gathered, x.shape[gather_dim])
        scattered = (
            tuple(scatter_sizes)
            if scatter_sizes is not None
            else blocks(x.shape[scatter_dim], group.size)
        )
        _sizes(group, scattered, x.shape[scatter_dim])
        rest = x.size // max(1, x.shape[scatter_dim] * x.shape[gather_dim])
        if not x.size:
            rest = math.prod(n for d, n in enumerate(x.shape) if d not in (scatter_dim, gather_dim))
        counts = tuple(a * b * rest for a in gathered for b in scattered)
        call = Call("all_to_all", algorithm or group.algorithm, None, x.dtype, counts)
        if agreed.wanted:
            agreed.on(x.dtype, f"gathered {gathered}, scattered {scattered}")
            group.validate(call)
    shape = with_size(x.shape, scatter_dim, scattered[group.rank])
    result = np.empty(with_size(shape, gather_dim, sum(gathered)), x.dtype)
    outermost = is_outermost(result.shape, gather_dim)
    packed = result.reshape(-1) if outermost else np.empty(result.size, x.dtype)

    def finish() -> np.ndarray:
        if not outermost:
            unpack(packed, result, gather_dim, gathered)
        return result

    return group.start(call, pack(x, scatter_dim, scattered), packed, finish, async_op)


def shift(
    group: ProcessGroup, x: Any, offset: int, out: Any, algorithm: str | None, async_op: bool
) -> Any:
    """Rank r gets the x of rank r - offset; shapes are equal on all ranks."""
    with checking(group, "shift") as agreed:
        x = as_array(x)
        result = result_array(out, x.shape, x.dtype)
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, offset={offset}")
        sizes = (x.size,) * group.size
        call = Call(
            "shift", algorithm or group.algorithm, None, x.dtype, sizes, offset=offset % group.size
        )
    return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)


def barrier(group: ProcessGroup, algorithm: str | None) -> None:
    """Return once every rank has come here."""
    with checking(group, "barrier") as agreed:
        agreed.on("", "")
        call = Call("barrier", algorithm or group.algorithm, None, EMPTY.dtype, (0,) * group.size)
    group.start(call, EMPTY, EMPTY, lambda: None)


# -- what the ranks tell each other first ----------------------------------------------------------


def gathered_sizes(group: ProcessGroup, own: int, sizes: Sizes) -> tuple[int, ...]:
    """Return every rank's size along a gathered dimension.

    None: all equal to this rank's; "exchange": the ranks tell each other; else as given.
    """
    if sizes is None:
        return (own,) * group.size
    if not isinstance(sizes, str):
        return tuple(int(size) for size in sizes)
    if sizes != "exchange":
        raise ConfigError(
            explain(
                "sizes", sizes, 'it is None, "exchange" or one size a rank', "Pass one of these"
            )
        )
    told = np.empty(group.size, np.int64)
    call = Call("all_gather", "auto", None, told.dtype, (1,) * group.size)
    group.start(call, np.array([own], np.int64), told, lambda: None)
    return tuple(told.tolist())


def announce(
    group: ProcessGroup, name: str, x: Any, src: int, differentiable: bool, template: bool
) -> Announced:
    """Tell all ranks the shape and dtype of the array on `src`; elsewhere x may be None.

    With `template`, an x given elsewhere must be like the source's.
    Raises BufferMismatchError if x is None on `src` or not like the source's.
    """
    with checking(group, name) as agreed:
        _rank(group, src, "src")
        x = None if x is None else as_array(x)
        header = _header(x, differentiable, src) if group.rank == src else _no_header()
        agreed.on("", f"src={src}")
    told = np.empty(HEADER, np.int64)
    call = Call("broadcast", "auto", None, told.dtype, (HEADER,), src)
    group.start(call, header, told, lambda: None)
    number, ndim, tensor = told[:3].tolist()
    kind = Announced(
        tuple(told[3 : 3 + ndim].tolist()), dtype_of(_HEADER_DTYPES[number]), bool(tensor)
    )
    with checking(group, name):
        if template and x is not None and (x.shape, x.dtype) != kind[:2]:
            raise BufferMismatchError(
                explain(
                    "x",
                    f"{x.dtype} {x.shape}",
                    f"rank {src} sends {kind.dtype} {kind.shape}",
                    "Pass None, or an array like the source's",
                )
            )
    return kind


def _header(x: np.ndarray | None, differentiable: bool, src: int) -> np.ndarray:
    if x is None:
        raise BufferMismatchError(
            explain("x", None, f"rank {src} is the source", "Pass the array there")
        )
    if x.ndim > HEADER - 3:
        raise ConfigError(
            explain("x.ndim", x.ndim, f"at most {HEADER - 3} dimensions", "Reshape it")
        )
    header = np.zeros(HEADER, np.int64)
    header[:3] = _HEADER_DTYPES.index(x.dtype.name), x.ndim, differentiable
    header[3 : 3 + x.ndim] = x.shape
    return header


def _no_header() -> np.ndarray:
    return np.empty(0, np.int64)


# -- validation ------------------------------------------------------------------------------------


def _op(op: Any) -> Any:
    """Return a name for a predefined MPI.Op, so that it runs on our own schedules."""
    if isinstance(op, str):
        return op
    if not isinstance(op, MPI.Op):
        raise ConfigError(explain("op", op, "it is a name or an MPI.Op", 'Pass "sum"'))
    for name, known in _PREDEFINED.items():
        if op == known:
            return name
    return UserOp(op)


def _rank(group: ProcessGroup, rank: int, parameter: str) -> None:
    if not 0 <= rank < group.size:
        raise ConfigError(
            explain(parameter, rank, f"the group has ranks 0..{group.size - 1}", "Pass one of them")
        )


def _rest(shape: Sequence[int], dim: int) -> int:
    """The number of elements of one slice along `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def _sizes(group: ProcessGroup, sizes: tuple[int, ...], total: int) -> None:
    if len(sizes) != group.size or sum(sizes) != total or min(sizes) < 0:
        raise BufferMismatchError(
            explain(
                "sizes",
                sizes,
                f"they are {group.size} sizes that add up to {total}",
                f"For an even cut pass None: {blocks(total, group.size)}",
            )
        )


def _own(group: ProcessGroup, sizes: tuple[int, ...], own: int) -> None:
    if len(sizes) != group.size or sizes[group.rank] != own:
        raise BufferMismatchError(
            explain(
                "sizes",
                sizes,
                f"they are {group.size} sizes, and this rank (r={group.rank}) brings {own}",
                'Pass the size of every rank, or "exchange"',
            )
        )
