"""`algorithm="mpi"`: the MPI library's own collectives, non-blocking, on the same flat buffers.

They are the peer that the explicit schedules are measured against.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar import schedule
from mpipar.comm.buffers import LIMIT, library_type
from mpipar.errors import ConfigError, explain
from mpipar.partition import offsets

COLLECTIVES = tuple(name for name in schedule.COLLECTIVES if name != "shift")
_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}


def start(
    comm: MPI.Comm,
    collective: str,
    source: np.ndarray,
    output: np.ndarray,
    sizes: Sequence[int],
    op: Any,
    root: int,
) -> MPI.Request:
    """Start the library's collective; `sizes` are the elements of each block.

    Raises ConfigError if a count does not fit in 32 bits.
    """
    if max(source.nbytes, output.nbytes) > LIMIT:
        raise ConfigError(
            explain(
                "algorithm",
                "mpi",
                f"the library's counts have 32 bits, and this is {source.nbytes} bytes",
                'Use "auto"',
            )
        )
    if collective == "barrier":
        return comm.Ibarrier()
    mpi_op = op.op if hasattr(op, "op") else _OPS.get(op or "sum", MPI.SUM)
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        kind = library_type(source.dtype)
        sent, received = [source, source.size, kind], [output, output.size, kind]
        if collective == "all_reduce":
            same = source.ctypes.data == output.ctypes.data
            return comm.Iallreduce(MPI.IN_PLACE if same else sent, received, mpi_op)
        if collective == "reduce":
            return comm.Ireduce(sent, received if comm.rank == root else None, mpi_op, root)
        return comm.Ireduce_scatter(sent, received, list(sizes), mpi_op)
    bytes_in, bytes_out = source.view(np.uint8), output.view(np.uint8)
    lengths = [size * source.dtype.itemsize for size in sizes]
    one_in, one_out = [bytes_in, bytes_in.size, MPI.BYTE], [bytes_out, bytes_out.size, MPI.BYTE]
    if collective == "broadcast":
        if comm.rank == root and source is not output:
            np.copyto(output, source)
        return comm.Ibcast(one_out, root)
    if collective == "all_to_all":
        p, r = comm.size, comm.rank
        to, fro = lengths[r * p : r * p + p], lengths[r : p * p : p]
        return comm.Ialltoallv(
            [bytes_in, to, list(offsets(to)), MPI.BYTE],
            [bytes_out, fro, list(offsets(fro)), MPI.BYTE],
        )
    whole = [lengths, list(offsets(lengths)), MPI.BYTE]
    if collective == "all_gather":
        return comm.Iallgatherv(one_in, [bytes_out, *whole])
    if collective == "gather":
        return comm.Igatherv(one_in, [bytes_out, *whole] if comm.rank == root else None, root)
    return comm.Iscatterv([bytes_in, *whole] if comm.rank == root else None, one_out, root)
