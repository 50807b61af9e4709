"""What each collective means for arrays: its blocks, its input, its output.

Every function validates, states the call, lays out the input as blocks one behind the other, and
hands over to `ProcessGroup.start`.  p ranks in the group, r this rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipar.arrays import Array, is_device, module
from mpipar.comm.announce import Announced, Sizes, gathered_sizes
from mpipar.comm.binding import axis, is_outermost, pack, unpack, with_size
from mpipar.comm.buffers import address, as_array, empty, flat, require_apart, result_array
from mpipar.comm.calls import Call, check_rank, operation
from mpipar.comm.check import checking
from mpipar.comm.group import ProcessGroup
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.partition import blocks

EMPTY = np.empty(0, np.uint8)


def all_reduce(
    group: ProcessGroup, x: Any, op: Any, out: Any, algorithm: str | None, async_op: bool
) -> Any:
    """Every rank gets the reduction of all ranks' x."""
    with checking(group, "all_reduce") as agreed:
        x = as_array(x)
        result = result_array(out, x.shape, x.dtype, is_device(x))
        require_apart(x, out, _same_place(x, result, 0, x.size), ", except as x itself")
        call = Call("all_reduce", group.asked(algorithm), operation(op), x.dtype, (x.size,))
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, op={operation(op)}, algorithm={call.algorithm}")
            group.validate(call)
    return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)


def reduce(
    group: ProcessGroup, x: Any, dst: int, op: Any, algorithm: str | None, async_op: bool
) -> Any:
    """The rank `dst` gets the reduction of all ranks' x; the others get None."""
    with checking(group, "reduce") as agreed:
        x = as_array(x)
        check_rank(group.size, dst, "dst")
        call = Call("reduce", group.asked(algorithm), operation(op), x.dtype, (x.size,), dst)
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, op={operation(op)}, dst={dst}")
            group.validate(call)
    if group.rank != dst:
        return group.start(call, flat(x), empty(0, x), lambda: None, async_op)
    result = empty(x.shape, x)
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
        result = result_array(out, with_size(x.shape, dim, cut[group.rank]), x.dtype, is_device(x))
        rest = _rest(x.shape, dim)
        counts = tuple(size * rest for size in cut)
        own = sum(counts[: group.rank]), counts[group.rank]
        same = is_outermost(x.shape, dim) and _same_place(result, x, *own)
        require_apart(x, out, same, ", except its own block")
        how = group.asked(algorithm)
        call = Call("reduce_scatter", how, operation(op), x.dtype, counts, dims=(dim,))
        if agreed.wanted:
            agreed.on(x.dtype, f"shape {x.shape}, dim={dim}, sizes={cut}, op={operation(op)}")
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
        result = result_array(out, shape, x.dtype, is_device(x))
        rest = _rest(x.shape, dim)
        counts = tuple(size * rest for size in cut)
        own = sum(counts[: group.rank]), counts[group.rank]
        same = is_outermost(shape, dim) and _same_place(x, result, *own)
        require_apart(x, out, same, ", except as its own block")
        how = group.asked(algorithm)
        call = Call("all_gather", how, None, x.dtype, counts, dims=(dim,))
        if agreed.wanted:
            agreed.on(x.dtype, f"{counts}")
            group.validate(call)
    if is_outermost(shape, dim):
        return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)
    packed = empty(result.size, x)

    def finish() -> Array:
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
        check_rank(group.size, dst, "dst")
        if agreed.wanted:
            loose = (*x.shape[:dim], "*", *x.shape[dim + 1 :])
            agreed.on(x.dtype, f"shape {loose}, dim={dim}, dst={dst}")
    cut = gathered_sizes(group, x.shape[dim], "exchange")
    rest = _rest(x.shape, dim)
    counts = tuple(size * rest for size in cut)
    how = group.asked(algorithm)
    call = Call("gather", how, None, x.dtype, counts, dst, dims=(dim,))
    if group.rank != dst:
        return group.start(call, flat(x), empty(0, x), lambda: None, async_op)
    result = empty(with_size(x.shape, dim, sum(cut)), x)
    packed = result.reshape(-1) if is_outermost(result.shape, dim) else empty(result.size, result)

    def finish() -> Array:
        if not is_outermost(result.shape, dim):
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
        device = kind.device if x is None is out else is_device(x) or is_device(out)
        result = result_array(out, kind.shape, kind.dtype, device)
        if x is not None:
            same = _same_place(x, result, 0, result.size)
            require_apart(x, out, same, ", except as x itself")
    count = math.prod(kind.shape)
    call = Call("broadcast", group.asked(algorithm), None, kind.dtype, (count,), src)
    source = flat(as_array(x)) if group.rank == src else empty(0, result)
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
    how = group.asked(algorithm)
    call = Call("scatter", how, None, kind.dtype, counts, src, dims=(dim,))
    xp = module("cuda" if kind.device else "cpu")
    result = xp.empty(with_size(kind.shape, dim, cut[group.rank]), kind.dtype)
    source = pack(as_array(x), dim, cut) if group.rank == src else empty(0, result)
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
                explain("gather_dim", gather_dim, "it must differ from scatter_dim", "Choose two")
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
        how, dims = group.asked(algorithm), (scatter_dim, gather_dim)
        call = Call("all_to_all", how, None, x.dtype, counts, dims=dims)
        if agreed.wanted:
            agreed.on(x.dtype, f"gathered {gathered}, scattered {scattered}")
            group.validate(call)
    shape = with_size(x.shape, scatter_dim, scattered[group.rank])
    result = empty(with_size(shape, gather_dim, sum(gathered)), x)
    outermost = is_outermost(result.shape, gather_dim)
    packed = result.reshape(-1) if outermost else empty(result.size, x)

    def finish() -> Array:
        if not outermost:
            unpack(packed, result, gather_dim, gathered)
        return result

    return group.start(call, pack(x, scatter_dim, scattered), packed, finish, async_op)


def exchange(group: ProcessGroup, x: Any, counts: Sequence[Sequence[int]]) -> Any:
    """Send rows of x (n, ...) to other ranks, any number to each; return those that came.

    counts[i][j] rows go from rank i to rank j; every rank states them all.  x has them in the order
    of the receivers, the result in the order of the senders.
    """
    with checking(group, "exchange") as agreed:
        x = as_array(x)
        cut = tuple(tuple(int(n) for n in row) for row in counts)
        sent, came = sum(cut[group.rank]), sum(row[group.rank] for row in cut)
        if not x.ndim or len(x) != sent:
            rule = f"its rows must be the {sent} that counts[{group.rank}] states"
            raise BufferMismatchError(explain("x.shape", x.shape, rule, "Pass these rows"))
        row = math.prod(x.shape[1:])
        sizes = tuple(n * row for line in cut for n in line)
        call = Call("all_to_all", group.algorithm, None, x.dtype, sizes, once=True)
        if agreed.wanted:
            agreed.on(x.dtype, f"rows {x.shape[1:]}, counts {cut}")
            group.validate(call)
    result = empty((came, *x.shape[1:]), x)
    return group.start(call, flat(x), result.reshape(-1), lambda: result)


def shift(
    group: ProcessGroup,
    x: Any,
    offset: int,
    out: Any,
    algorithm: str | None,
    async_op: bool,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
) -> Any:
    """Rank r gets the x of rank r - offset.

    Shapes are equal on all ranks, or differ along `dim`: `sizes` are those of every rank's x.
    """
    with checking(group, "shift") as agreed:
        x = as_array(x)
        if not isinstance(offset, int | np.integer):
            raise ConfigError(explain("offset", offset, "it must be a whole number", "Pass 1"))
        shape, counts, loose = x.shape, (x.size,) * group.size, f"shape {x.shape}"
        if sizes is not None:
            dim = axis(dim, x.ndim)
            _own(group, tuple(sizes), x.shape[dim])
            shape = with_size(shape, dim, sizes[(group.rank - offset) % group.size])
            counts = tuple(size * _rest(shape, dim) for size in sizes)
            loose = f"shape {with_size(shape, dim, 0)}, dim={dim}, sizes={tuple(sizes)}"
        result = result_array(out, shape, x.dtype, is_device(x))
        require_apart(x, out, group.size == 1, "")
        if agreed.wanted:
            agreed.on(x.dtype, f"{loose}, offset={offset}")
        call = Call(
            "shift", group.asked(algorithm), None, x.dtype, counts, offset=offset % group.size
        )
    return group.start(call, flat(x), result.reshape(-1), lambda: result, async_op)


def barrier(group: ProcessGroup, algorithm: str | None) -> None:
    """Return once every rank has come here."""
    with checking(group, "barrier") as agreed:
        agreed.on("", "")
        call = Call("barrier", group.asked(algorithm), None, EMPTY.dtype, (0,) * group.size)
    group.start(call, EMPTY, EMPTY, lambda: None)


# -- validation ------------------------------------------------------------------------------------


def _rest(shape: Sequence[int], dim: int) -> int:
    """The number of elements of one slice along `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def _same_place(part: Array, whole: Array, start: int, count: int) -> bool:
    """Say whether `part` lies exactly at these elements of the contiguous `whole`."""
    place = address(whole) + start * whole.dtype.itemsize
    return part.flags.c_contiguous and part.size == count and address(part) == place


def _sizes(group: ProcessGroup, sizes: tuple[int, ...], total: int) -> None:
    if len(sizes) != group.size or sum(sizes) != total or min(sizes) < 0:
        raise BufferMismatchError(
            explain(
                "sizes",
                sizes,
                f"they must be {group.size} sizes that add up to {total}",
                f"For an even cut pass None: {blocks(total, group.size)}",
            )
        )


def _own(group: ProcessGroup, sizes: tuple[int, ...], own: int) -> None:
    if len(sizes) != group.size or sizes[group.rank] != own:
        raise BufferMismatchError(
            explain(
                "sizes",
                sizes,
                f"they must be {group.size} sizes; this rank (r={group.rank}) brings {own}",
                'Pass the size of every rank, or "exchange"',
            )
        )
