"""How the job was started: launcher, slots, and which process is which rank."""

import os
from collections.abc import Mapping, Sequence

from mpi4py import MPI

from mpipar.doctor.finding import Check, Facts, Finding, Job, listed
from mpipar.doctor.machine import Machine
from mpipar.train import launch

NONE = "no launcher"
SHOWN = 8  # nodes named in the table


def probe(machine: Machine) -> Facts:
    """Look at what the launcher left."""
    started_by = launcher(os.environ)
    # without a launcher, MPICH would look for one to ask, and hang at the end
    slots = machine.world.Get_attr(MPI.UNIVERSE_SIZE) if started_by != NONE else None
    return {
        "rank": machine.world.rank,
        "host": machine.job.hosts[machine.world.rank],
        "node": machine.node,
        "pid": os.getpid(),
        "launcher": started_by,
        "slots": slots,
        "mismatch": launch.mismatch(machine.world.size),
    }


def launcher(environ: Mapping[str, str]) -> str:
    """Return who started this process."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "mpiexec of Open MPI"
    if "SLURM_STEP_ID" in environ and "HYDI_CONTROL_FD" not in environ:
        return "srun"
    if "PMI_RANK" in environ:
        return "mpiexec of MPICH"
    return NONE


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say whether launcher and library agree."""
    nodes = [
        f"{job.where(number)}: {'ranks' if len(ranks) > 1 else 'rank'} {listed(ranks)}"
        for number, ranks in enumerate(job.nodes)
    ]
    more = f"; and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    count = "1 rank" if len(told) == 1 else f"{len(told)} ranks"
    words = f"{told[0]['launcher']}, {count}; " + "; ".join(nodes[:SHOWN]) + more
    slots = told[0]["slots"]
    if slots and slots != len(told):
        words += f"; slots: {slots}"
    facts = {"launcher": told[0]["launcher"], "slots": slots, "ranks": [_member(f) for f in told]}
    trouble = next((facts["mismatch"] for facts in told if facts["mismatch"]), None)
    if trouble:
        return unfit(trouble)
    if len(told) == 1 and told[0]["launcher"] == NONE:
        fix = f"To look at several ranks: {launch.command(4)} mpipar doctor"
        return Finding("launcher", "ok", words, fix, facts)
    return Finding("launcher", "ok", words, "", facts)


def unfit(trouble: str) -> Finding:
    """Return the finding about a launcher that does not speak with the library."""
    what, _, fix = trouble.partition(". ")
    return Finding("launcher", "problem", what, fix)


def _member(facts: Facts) -> Facts:
    return {key: facts[key] for key in ("rank", "host", "node", "pid")}


CHECK = Check("launcher", probe, judge)
