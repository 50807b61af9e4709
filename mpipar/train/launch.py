"""How this job was started: does the launcher agree with MPI, and which command is right here.

A launcher that does not speak the same protocol as the MPI library starts every process as a
world of its own: four jobs of one rank instead of one of four, each writing the same log.
`mismatch` sees it from what the launcher left in the environment.

    srun -n 4            SLURM_STEP_NUM_TASKS=4 (SLURM_NTASKS=4 in the batch script)   world size 1
    another MPI's        PMI_SIZE=4 (MPICH) or OMPI_COMM_WORLD_SIZE=4 (Open MPI)       world size 1
"""

import faulthandler
import os
import sys
from collections.abc import Mapping

START, LONGEST = 10.0, 86400.0  # seconds that MPI may take to start, at least and at most
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMIX_RANK")

SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def mismatch(
    size: int, environ: Mapping[str, str] = os.environ, library: str | None = None
) -> str | None:
    """Say what is wrong and how to fix it, if the launcher started more ranks than MPI sees.

    `size`: of MPI's world.  `library`: "MPICH" or "Open MPI", asked of MPI if None.
    """
    if size > 1:
        return None
    library = mpi_library() if library is None else library
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (tasks := _number(environ, variable)) is not None:
            if tasks <= 1:
                return None
            starter = "srun" if "SLURM_STEP_ID" in environ and variable == "PMI_SIZE" else "mpiexec"
            whose = "Open MPI" if variable.startswith("OMPI") else "MPICH"
            return (
                f"{variable}={tasks}, but MPI sees a world of 1 rank: {starter} started {tasks} "
                f"separate jobs. This Python's mpi4py uses {library}, the launcher speaks the "
                f"protocol of {whose}. Start it with the mpiexec of the same environment as "
                f"Python: {command(tasks, library)} mpipar train"
            )
    variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    tasks = _number(environ, variable) or 1
    if tasks <= 1:
        return None
    plugin = "pmix" if library == "Open MPI" else "pmi2"
    return (
        f"{variable}={tasks}, but MPI sees a world of 1 rank: srun started {tasks} separate jobs, "
        f"because it does not speak the protocol of {library}. Use srun --mpi={plugin} "
        f"(srun --mpi=list shows what there is), or start the job inside sbatch or salloc with "
        f"mpiexec -n {tasks} mpipar train"
    )


def start(environ: Mapping[str, str] = os.environ, limit: float = 600.0) -> str | None:
    """Collective: start MPI, if it is not yet; say what is wrong if the launcher does not fit.

    limit: seconds, 10 at least, after which the process ends, and shows where it was, if MPI has
    not started, as when another one is gone.
    MPICH ends a process that Open MPI's mpiexec started, so that is looked at first.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=True)
    tasks = _number(environ, "OMPI_COMM_WORLD_SIZE")
    if tasks is not None and mpi_library() == "MPICH":
        return (
            f"OMPI_COMM_WORLD_SIZE={tasks}: Open MPI's mpiexec started this job, but this "
            f"Python's mpi4py uses MPICH. Start it with the mpiexec of the same environment as "
            f"Python: {command(tasks, 'MPICH')} mpipar train"
        )
    from mpi4py import MPI

    if not MPI.Is_initialized():
        # it waits for all processes, and keeps Python's other threads from running meanwhile
        faulthandler.dump_traceback_later(min(max(START, limit), LONGEST), exit=True)
        MPI.Init_thread()
        faulthandler.cancel_dump_traceback_later()
    return mismatch(MPI.COMM_WORLD.size, environ)


def first_of_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether the launcher numbers this process 0, whatever MPI thinks of it."""
    return rank_of_job(environ) == 0


def rank_of_job(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number that the launcher gives this process; 0 if there is none."""
    numbers = [_number(environ, variable) for variable in RANK_VARIABLES]
    return next((number for number in numbers if number is not None), 0)


def has_peers(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether a launcher started this process as one of several, whatever MPI thinks of it."""
    return any((_number(environ, variable) or 1) > 1 for variable in SIZE_VARIABLES)


def mpi_library() -> str:
    """Return "MPICH", "Open MPI" or the name that the MPI library gives itself."""
    from mpi4py import MPI

    name = MPI.get_vendor()[0]
    return name if name != "unknown" else MPI.Get_library_version().split()[0]


def command(ranks: int, library: str | None = None, slots: int | None = None) -> str:
    """Return the `mpiexec` command that starts `ranks` ranks on this machine with this MPI.

    Open MPI starts no more ranks than cores, and nothing for root, unless told to.
    """
    library = mpi_library() if library is None else library
    flags = ""
    if library == "Open MPI":
        slots = os.cpu_count() or 1 if slots is None else slots
        flags += " --oversubscribe" * (ranks > slots)
        flags += " --allow-run-as-root" * (hasattr(os, "geteuid") and os.geteuid() == 0)
    return f"mpiexec{flags} -n {ranks}"


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    return int(text) if text.isdigit() else None
