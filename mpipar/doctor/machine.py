"""What every probe is given: the ranks, who shares a node, and quiet ways to wait."""

import platform
import time
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from mpipar.comm import abort, node
from mpipar.comm.shared_memory import Team
from mpipar.doctor.finding import Job

POLL = 1e-3  # seconds; who waits must not disturb who measures


@dataclass(frozen=True)
class Machine:
    """The ranks of this job, on a communicator of the doctor's own."""

    world: MPI.Intracomm
    team: Team
    job: Job
    directory: Path
    default_threads: dict[str, int]  # of the BLAS libraries, before mpipar sets them

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.job.node_of[self.world.rank]

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.team.local.rank == 0

    def meet(self) -> None:
        """Wait for all ranks without keeping a core busy; collective."""
        rest(self.world.Ibarrier())

    def free(self) -> None:
        """Free the communicators; collective."""
        self.team.free()
        self.world.Free()


def explore(world: MPI.Intracomm, directory: Path) -> Machine:
    """Find out where the ranks are; collective."""
    import threadpoolctl

    abort.install()
    own = MPI.Intracomm(world.Dup())
    before = {
        info["internal_api"]: info["num_threads"]
        for info in threadpoolctl.threadpool_info()
        if info["user_api"] == "blas"
    }
    team = Team(own)
    node.set_blas_threads(team.nodes)
    crowded = node.local_ranks(team.nodes) > node.cores()
    told = own.allgather((platform.node(), crowded))
    job = Job(tuple(host for host, _ in told), team.nodes.node_of, any(c for _, c in told))
    return Machine(own, team, job, directory, before)


def rest(request: MPI.Request) -> None:
    """Wait for a request asleep."""
    while not request.Test():
        time.sleep(POLL)
