"""What is left when ranks of a job are gone: ULFM, the part of MPI that lets the others go on.

    rank 0   all_reduce ── error ── revoke ──┐
    rank 1   all_reduce ──────────── revoked ┤  agree: not committed ── shrink ── a world of three
    rank 2   killed                          │
    rank 3   another call ────────── revoked ┘

A rank whose message has lost its peer gets an error; one that waits for somebody else would not.
So whoever sees the error revokes every communicator there is, which ends all waits in them.  Bland
et al., Post-failure recovery of MPI communication capability (2013).  Open MPI has it under
`mpiexec --with-ft ulfm`.
"""

import atexit
import contextlib
import os
import signal
from typing import cast

from mpi4py import MPI

from mpipar.comm import flight, shared_memory, waiting
from mpipar.errors import PeerError

GONE = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
PARTING = 10  # seconds for MPI to come to its end
SWITCH = "OMPI_MCA_mpi_ft_enable"  # what `mpiexec --with-ft ulfm` puts into the environment


def supported() -> bool:
    """Say whether this job can go on without some of its ranks."""
    wanted = os.environ.get(SWITCH, "").lower() in ("1", "true", "yes")
    return wanted and MPI.get_vendor()[0] == "Open MPI"


def tells(error: BaseException, world: MPI.Comm) -> bool:
    """Say whether an error comes from a rank of `world` that is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerError):
            return True
        if isinstance(seen, MPI.Exception) and seen.Get_error_class() in GONE:
            return True
        seen = seen.__cause__ or seen.__context__
    return bool(world.Is_revoked()) or world.Get_failed().size > 0


def leave_all(world: MPI.Comm) -> None:
    """Revoke all communicators of this rank, and forget what it had in flight in them."""
    teams = [comm for team in tuple(shared_memory.teams) for comm in (team.local, team.across)]
    for comm in [*flight.abandon(), *teams, world]:
        if comm != MPI.COMM_NULL:
            with contextlib.suppress(MPI.Exception):
                comm.Revoke()
    waiting.abandon()


def agree(world: MPI.Comm, fine: bool) -> bool:
    """Collective over what is left of `world`: say whether all are there and `fine` on all."""
    try:
        return bool(world.Agree(int(fine)))
    except MPI.Exception:  # a rank is gone: all that are left get this
        return False


def shrink(world: MPI.Comm) -> MPI.Intracomm:
    """Collective over what is left of `world`: return a communicator of these ranks."""
    made = cast(MPI.Intracomm, world.Shrink())
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def end_in_time() -> None:
    """Let the system end this process some seconds after its exit began, if it has not ended.

    Open MPI now and then waits for ever in MPI_Finalize when a rank was killed.
    """
    atexit.register(_set_alarm)


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PARTING)
