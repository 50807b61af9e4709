"""Which ranks fail of the same error: what all of them would print is printed by one.

    rank 0   error A   tells the others, and hears theirs   prints A: "ranks 0, 1, 3 failed"
    rank 1   error A   tells rank 0, and hears A of it      prints nothing
    rank 2   error B   tells rank 0, and hears A of it      prints B
    rank 3   error A   tells rank 0, and hears A of it      prints nothing

A rank that fails alone waits for GRACE, and then nobody has told it anything.
"""

import time
import zlib

from mpi4py import MPI

TAG = 32767  # on COMM_WORLD: the highest that every MPI has, which programs hardly use
GRACE = 0.5  # seconds for the others to fail as well

_sent: list[MPI.Request] = []


def ranks_with(error: str) -> tuple[list[int], bool]:
    """Return the ranks, this one included, that are known to fail of an error of these words.

    On rank 0 that is all of them, on others only rank 0, if it does.  Also says, on rank 0, whether
    all ranks fail, of whatever error.
    """
    world = MPI.COMM_WORLD
    mine = zlib.crc32(error.encode()).to_bytes(4, "little")
    others = range(1, world.size) if world.rank == 0 else (0,)
    same, missing, until = [world.rank], len(others), time.monotonic() + GRACE
    try:
        _sent.extend(world.Isend([mine, 4, MPI.BYTE], rank, TAG) for rank in others)
        while missing and time.monotonic() < until:
            status = MPI.Status()
            message = world.Improbe(MPI.ANY_SOURCE, TAG, status)
            if message is None:
                time.sleep(0.002)
                continue
            theirs = bytearray(4)
            message.Recv([theirs, 4, MPI.BYTE])
            missing -= 1
            if theirs == mine:
                same.append(status.source)
    except MPI.Exception:  # what fails may be MPI
        return [world.rank], False
    return sorted(same), world.rank == 0 and not missing
