"""`mpipar bench checkpoint`: all ranks save and load, beside one process and a plain file.

    plain    rank 0 writes a file from end to end and syncs it; reads it; the others wait
    ours     mp.save of float32 matrices that are cut over all ranks, synced too; mp.load

The two take turns, on files of the same size in the same folder; medians count.  Before each read
the system is asked to forget what it has of the file, so that both come from the disk.  Matrices
have rows of 16 KiB and are cut by rows, as a column layer's weight (a rank's share is one range of
the file), or by columns, as a row layer's (a short range in every row).

Memory: the most that a rank has in use during the call over what it had before it.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from mpipar.bench.torch_gpt import peak_mb
from mpipar.bench.train_memory import forget_peak
from mpipar.checkpoint import load, save
from mpipar.checkpoint.checksum import BLOCK
from mpipar.errors import CheckpointError, ConfigError, explain
from mpipar.nn import Parameter
from mpipar.nn.spec import Spec
from mpipar.parallel.communicator import Communicator

Cut = Literal["rows", "columns"]
SIDE = 4096  # elements of a row, and rows of a matrix


@dataclass(frozen=True)
class Row:
    """One way to cut, as it is written to JSON: seconds, bytes a second, MiB of a rank.

    ratio: our bytes a second over those of one process.  extra: memory beside the arrays.
    """

    cut: str
    ranks: int
    bytes: int
    write_s: float
    plain_write_s: float
    write_ratio: float
    write_extra_mb: float
    read_s: float
    plain_read_s: float
    read_ratio: float
    read_extra_mb: float


def check_room(parent: Path, nbytes: int) -> None:
    """Raise ConfigError if there is no such folder, or no room in it for both files."""
    if not parent.is_dir():
        raise ConfigError(explain("dir", str(parent), "it must be a folder", "Name another"))
    free = shutil.disk_usage(parent).free
    if free < 2.5 * nbytes:
        rule = f"two files need {2.5 * nbytes / 2**20:.0f} MiB, and {free / 2**20:.0f} are free"
        raise ConfigError(explain("size", nbytes, rule, "Pass a smaller one, or another --dir"))


@contextmanager
def workplace(comm: Communicator, parent: Path) -> Iterator[Path]:
    """Collective: yield a new folder for the files, which is deleted in the end."""
    made = tempfile.mkdtemp(prefix="mpipar-bench-", dir=parent) if comm.rank == 0 else ""
    try:
        yield Path(str(comm.process_group.raw.bcast(made)))
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


def matrices(comm: Communicator, cut: Cut, nbytes: int) -> dict[str, Parameter]:
    """Return this rank's parts of float32 matrices that have about `nbytes` in all."""
    rows = max(comm.size, nbytes // (4 * SIDE))
    count = -(-rows // SIDE)
    found = {}
    for number in range(count):
        whole = Spec.replicated(f"w{number}", (rows // count, SIDE))
        spec = whole.shard("tp", int(cut == "columns"), comm.rank, comm.size)
        data = np.full(spec.local_shape, 1 + number + comm.rank, np.float32)
        found[spec.name] = Parameter(data, spec)
    return found


def measure(comm: Communicator, cut: Cut, nbytes: int, repeats: int, folder: Path) -> Row:
    """Collective: return the row of a way to cut; `folder` is the same on every rank, and empty."""
    arrays = matrices(comm, cut, nbytes)
    size = 4 * sum(int(np.prod(one.spec.shape)) for one in arrays.values())
    plain, ours = folder / "plain", folder / "saved"
    file = ours / "model.safetensors"
    times: dict[str, list[float]] = {name: [] for name in ("plain", "ours", "read", "load")}
    extra = np.zeros(2)

    def first(action: Callable[[], None]) -> Callable[[], None]:
        return action if comm.rank == 0 else lambda: None

    for _ in range(repeats):
        if comm.rank == 0:
            plain.unlink(missing_ok=True)
            shutil.rmtree(ours, ignore_errors=True)
        times["plain"].append(_timed(comm, first(lambda: _write_plain(plain, size))))
        before = _mark()
        times["ours"].append(_timed(comm, lambda: save(ours, {"model": arrays}, comm)))
        extra[0] = max(extra[0], peak_mb() - before)
        first(lambda: _forget(plain))()
        times["read"].append(_timed(comm, first(lambda: _read_plain(plain))))
        _forget(file)
        before = _mark()
        times["load"].append(_timed(comm, lambda: load(ours, {"model": arrays}, comm)))
        extra[1] = max(extra[1], peak_mb() - before)
    _check(comm, arrays)
    extra = comm.all_reduce(extra, "max") if comm.size > 1 else extra
    seconds = {name: median(each) for name, each in times.items()}
    return Row(
        cut=cut,
        ranks=comm.size,
        bytes=size,
        write_s=seconds["ours"],
        plain_write_s=seconds["plain"],
        write_ratio=seconds["plain"] / seconds["ours"],
        write_extra_mb=float(extra[0]),
        read_s=seconds["load"],
        plain_read_s=seconds["read"],
        read_ratio=seconds["read"] / seconds["load"],
        read_extra_mb=float(extra[1]),
    )


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON objects."""
    return [asdict(row) for row in rows]


def _timed(comm: Communicator, action: Callable[[], object]) -> float:
    """Collective: return the seconds until all ranks have done it, the same on every rank."""
    comm.barrier()
    start = time.perf_counter()
    action()
    comm.barrier()
    mine = np.array([time.perf_counter() - start])
    return float(comm.broadcast(mine, src=0)[0]) if comm.size > 1 else float(mine[0])


def _mark() -> float:
    """Begin to look for the most memory; return the MiB that are in use now."""
    forget_peak()
    return peak_mb()


def _write_plain(path: Path, nbytes: int) -> None:
    data = np.ones(BLOCK, np.uint8)
    with open(path, "wb", buffering=0) as out:
        for at in range(0, nbytes, BLOCK):
            out.write(data[: nbytes - at].data)
        os.fsync(out.fileno())


def _read_plain(path: Path) -> None:
    data = np.empty(BLOCK, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(data.data):
            pass


def _forget(path: Path) -> None:
    """Ask the system to forget what it has of a file that is on the disk."""
    with suppress(AttributeError), open(path, "rb") as file:  # macOS has no such call
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check(comm: Communicator, arrays: dict[str, Parameter]) -> None:
    """Raise CheckpointError unless the arrays are what was saved."""
    for number, one in enumerate(arrays.values()):
        if not (one.data == 1 + number + comm.rank).all():
            raise CheckpointError(f"{one.spec.name} is not what was saved")
