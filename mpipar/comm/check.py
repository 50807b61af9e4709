"""check=True: before a collective sends anything, all ranks agree that they mean the same.

    with checking(group, "all_gather") as agreed:
        ... validate, may raise ...
        agreed.on(dtype=x.dtype, detail="shape (4, *), dim 1")

On leaving the block with check=True the ranks compare a hash of what each stated, by one small
all-gather of the library.  If they differ, or if one failed, all ranks raise together.  Without
check=True the block adds nothing, and an error is raised where it is seen.
"""

import zlib
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from mpi4py import MPI

from mpipar.comm.flight import describe_groups
from mpipar.errors import DtypeMismatchError, MismatchError

if TYPE_CHECKING:
    from mpipar.comm.group import ProcessGroup

TEXT_BYTES = 512


class checking:
    """Context manager around the local validation of a collective."""

    __slots__ = ("_detail", "_dtype", "_group", "_name")

    def __init__(self, group: "ProcessGroup", name: str) -> None:
        self._group, self._name = group, name
        self._dtype = self._detail = ""

    def __enter__(self) -> "checking":
        self._group.require_alive()
        return self

    def on(self, dtype: object, detail: str) -> None:
        """State what the other ranks must have too."""
        self._dtype, self._detail = str(dtype), detail

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._group.check or self._group.size == 1:
            return
        if error is not None and not isinstance(error, Exception):
            return
        self._agree(error)

    def _agree(self, error: BaseException | None) -> None:
        group = self._group
        number = group.sequence + 1
        what = f"#{number} {self._name}({self._dtype}, {self._detail})"
        text = what if error is None else f"#{number} {self._name}: error: {error}"
        sent = np.array([zlib.crc32(text.encode()) + (error is not None) * 2**33], np.int64)
        hashes = np.empty(group.size, np.int64)
        _poll(group.raw.Iallgather([sent, 1, MPI.INT64_T], [hashes, 1, MPI.INT64_T]), group)
        if error is None and (hashes == hashes[0]).all():
            return
        texts = _exchange_texts(group, text)
        if error is None:
            _raise(group, texts)

    @property
    def wanted(self) -> bool:
        """Whether it is worth composing the detail."""
        return self._group.check


def _exchange_texts(group: "ProcessGroup", text: str) -> list[str]:
    mine = np.zeros(TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT_BYTES], np.uint8)
    mine[: encoded.size] = encoded
    everyone = np.empty((group.size, TEXT_BYTES), np.uint8)
    request = group.raw.Iallgather([mine, TEXT_BYTES, MPI.BYTE], [everyone, TEXT_BYTES, MPI.BYTE])
    _poll(request, group)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone]


def _poll(request: MPI.Request, group: "ProcessGroup") -> None:
    from mpipar.comm import waiting

    waiting.wait(request.Test, group.flight)


def _raise(group: "ProcessGroup", texts: list[str]) -> NoReturn:
    message = (
        f"the ranks of communicator {group.name!r} do not agree: "
        + describe_groups(dict(enumerate(texts)))
        + ". Every rank of a group calls the same collectives in the same order with matching "
        "arguments"
    )
    dtypes = {text.partition("(")[2].partition(",")[0] for text in texts if ": error:" not in text}
    calls = {text.partition("(")[0] for text in texts}
    if len(calls) == 1 and len(dtypes) > 1:
        raise DtypeMismatchError(message)
    raise MismatchError(message)
