"""How device memory reaches MPI, agreed by the ranks of a group whose arrays live on GPUs.

    direct    MPI takes device memory; a message leaves once its stream has written it
    staged    device ──copy, event──> pinned memory ──MPI──> pinned memory ──copy──> device

Direct is taken if every rank knows that its MPI can: MPIPAR_CUDA_AWARE=1 says so, or
`mpipar doctor` has seen it (two ranks sent each other device memory), or the library says so.
"""

import ctypes
import functools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.arrays import is_device, module
from mpipar.comm.buffers import LIMIT
from mpipar.errors import ConfigError, explain

PIECE_BYTES = 1 << 20  # of a staged message: one is copied while the one before it travels
ASKED = "MPIPAR_CUDA_AWARE"


class Lane:
    """What the ranks of a group agree on: whether MPI is given device memory, in what pieces."""

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    @property
    def piece_bytes(self) -> int:
        """The longest message, for host arrays of the group too: both ends cut alike."""
        return LIMIT if self.direct else PIECE_BYTES

    def __str__(self) -> str:
        if self.direct:
            return "MPI takes device memory"
        return "device arrays are staged through pinned host memory"


def agree(raw: MPI.Comm, local_rank: int) -> Lane:
    """Collective: take this rank's GPU, and return how device memory travels.

    Raises ConfigError on every rank if one has no GPU that CuPy can use, or a wrong setting.
    """
    try:
        use_gpu(local_rank)
        mine, trouble = knows_device_memory(), ""
    except ConfigError as error:
        mine, trouble = False, str(error)
    told = raw.allgather((mine, trouble))
    for rank, (_, wrong) in enumerate(told):
        if wrong:
            raise ConfigError(wrong if wrong == trouble else f"rank {rank}: {wrong}")
    lane = Lane(all(knows for knows, _ in told))
    if MPI.COMM_WORLD.rank == 0:
        _say(f"{lane}; gradients travel as messages, since a node's ranks share host memory only")
    return lane


_gpu: list[int] = []


def use_gpu(local_rank: int) -> None:
    """Make the GPU of this rank of the node the current one, once.

    Of those that CUDA_VISIBLE_DEVICES leaves, by the rank in the node; several may share one.  A
    device that the program has chosen itself, other than the first, stays.
    """
    if _gpu:
        return
    cupy: Any = module("cuda")
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
        chosen = int(cupy.cuda.runtime.getDevice()) if count else 0
    except cupy.cuda.runtime.CUDARuntimeError as error:
        rule = f"CuPy finds no usable GPU: {error}"
        raise ConfigError(explain("device", "cuda", rule, "See mpipar doctor")) from error
    if not count:
        rule, fix = "this rank sees no GPU", "Check CUDA_VISIBLE_DEVICES, or use device='cpu'"
        raise ConfigError(explain("device", "cuda", rule, fix))
    _gpu.append(chosen or local_rank % count)
    cupy.cuda.Device(_gpu[0]).use()


def knows_device_memory() -> bool:
    """Say whether this rank's MPI is known to take device memory.

    Raises ConfigError if MPIPAR_CUDA_AWARE is neither 0 nor 1.
    """
    asked = os.environ.get(ASKED, "")
    if asked not in ("", "0", "1"):
        raise ConfigError(explain(ASKED, asked, "it is 0 or 1", "Set one, or leave it out"))
    if asked:
        return asked == "1"
    seen = verdicts().get(_machine())
    return bool(cuda_support()) if seen is None else bool(seen)


def cuda_support() -> bool | None:
    """Return what the MPI library says of itself, or None if it cannot be asked."""
    try:
        asked = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return None
    asked.restype, asked.argtypes = ctypes.c_int, []
    return bool(asked())


# -- what `mpipar doctor` has seen -----------------------------------------------------------------


def verdict_path() -> Path:
    """Return the file in the user's cache folder that keeps what was seen."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    return Path(cache) / "mpipar" / "device_memory.json"


def verdicts() -> dict[str, bool]:
    """Return what was seen, by library and host; nothing if the file is none of ours."""
    try:
        kept = json.loads(verdict_path().read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def remember(works: bool) -> None:
    """Keep for this library on this host whether device memory arrives right."""
    path = verdict_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({**verdicts(), _machine(): works}, indent=1) + "\n")
    part.replace(path)


def _machine() -> str:
    library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
    return f"{socket.gethostname()}: {library}"


@functools.cache
def _say(words: str) -> None:
    print(f"mpipar: {words}", file=sys.stderr, flush=True)


# -- small calls, which travel from host buffers of their own --------------------------------------


def read(x: Any) -> np.ndarray:
    """Return a host array with the elements of x, which may live on a GPU: then a copy."""
    return module("cuda").asnumpy(x) if is_device(x) else x


def write(out: Any, host: np.ndarray) -> None:
    """Fill `out`, flat and contiguous, on either side."""
    if not is_device(out):
        out[:] = host
    elif out.size:
        out.set(host)
