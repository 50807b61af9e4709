"""What the ranks tell each other before a collective whose sizes not all of them know."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpipar.arrays import Array, is_device
from mpipar.arrays import dtype as dtype_of
from mpipar.comm.buffers import DTYPES, as_array
from mpipar.comm.calls import Call, check_rank
from mpipar.comm.check import checking
from mpipar.comm.group import ProcessGroup
from mpipar.errors import BufferMismatchError, ConfigError, explain

Sizes = Sequence[int] | str | None
HEADER = 16  # int64: dtype number, dimensions, 1 if a Tensor and 2 if on the device, shape


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and bool(size >= 0)


class Announced(NamedTuple):
    """What the source of a broadcast or scatter tells before the data."""

    shape: tuple[int, ...]
    dtype: np.dtype
    differentiable: bool
    device: bool


def gathered_sizes(group: ProcessGroup, own: int, sizes: Sizes) -> tuple[int, ...]:
    """Return every rank's size along a gathered dimension.

    None: all equal to this rank's; "exchange": the ranks tell each other; else as given.
    """
    if sizes is None:
        return (own,) * group.size
    if isinstance(sizes, tuple | list) and all(_is_size(size) for size in sizes):
        return tuple(int(size) for size in sizes)
    if not isinstance(sizes, str) or sizes != "exchange":
        raise ConfigError(
            explain(
                "sizes",
                sizes,
                'it must be None, "exchange" or one size a rank',
                "Pass one of these",
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
        check_rank(group.size, src, "src")
        x = None if x is None else as_array(x)
        header = _header(x, differentiable, src) if group.rank == src else _no_header()
        agreed.on("", f"src={src}")
    told = np.empty(HEADER, np.int64)
    call = Call("broadcast", "auto", None, told.dtype, (HEADER,), src)
    group.start(call, header, told, lambda: None)
    number, ndim, flags = told[:3].tolist()
    shape = tuple(told[3 : 3 + ndim].tolist())
    kind = Announced(shape, dtype_of(DTYPES[number]), bool(flags & 1), bool(flags & 2))
    with checking(group, name):
        if template and x is not None and (x.shape, x.dtype) != kind[:2]:
            raise BufferMismatchError(
                explain(
                    "x",
                    f"{x.dtype} {x.shape}",
                    f"it must be what rank {src} sends: {kind.dtype} {kind.shape}",
                    "Pass None, or an array like the source's",
                )
            )
    return kind


def _header(x: Array | None, differentiable: bool, src: int) -> np.ndarray:
    if x is None:
        raise BufferMismatchError(
            explain(
                "x", None, f"rank {src} is the source and must bring it", "Pass the array there"
            )
        )
    if x.ndim > HEADER - 3:
        raise ConfigError(
            explain("x.ndim", x.ndim, f"at most {HEADER - 3} dimensions", "Reshape it")
        )
    header = np.zeros(HEADER, np.int64)
    header[:3] = DTYPES.index(x.dtype.name), x.ndim, differentiable + 2 * is_device(x)
    header[3 : 3 + x.ndim] = x.shape
    return header


def _no_header() -> np.ndarray:
    return np.empty(0, np.int64)
