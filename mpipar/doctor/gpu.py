"""GPUs: which rank uses which, and whether MPI takes device memory or mpipar stages through host.

A library that knows nothing of CUDA crashes on a device pointer, so it is asked first
(MPIX_Query_cuda_support); only if it says yes, two ranks of a node send each other device memory.
What comes of it is kept in the user's cache folder, where training looks (comm/device.py).
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm.device import cuda_support, knows_device_memory, remember
from mpipar.doctor.finding import Check, Facts, Finding, Job, who
from mpipar.doctor.machine import Machine

DRIVER = Path("/proc/driver/nvidia/version")
ELEMENTS = 1024


def probe(machine: Machine) -> Facts:
    """Count devices; two ranks of the first node with two try a message from device memory."""
    facts: Facts = {"cupy": importlib.util.find_spec("cupy") is not None, "devices": 0, "mine": ""}
    facts |= {"driver": DRIVER.exists(), "aware": cuda_support(), "probe": "", "error": ""}
    if facts["cupy"]:
        facts |= _devices(machine)
    local = machine.team.local
    able = bool(facts["devices"] and facts["aware"])
    if local.allreduce(able, MPI.LAND) and local.size > 1 and local.rank < 2:
        facts["probe"] = _exchange(local)
        if local.rank == 0:
            remember(facts["probe"] == "works")
    local.barrier()
    facts["direct"] = knows_device_memory()
    return facts


def _devices(machine: Machine) -> Facts:
    import cupy

    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return {"error": str(error)}
    if not count:
        return {}
    mine = cupy.cuda.runtime.getDevice()
    properties = cupy.cuda.runtime.getDeviceProperties(mine)
    bus = cupy.cuda.runtime.deviceGetPCIBusId(mine)
    return {"devices": count, "mine": f"{properties['name'].decode()} at {bus}"}


def _exchange(local: MPI.Intracomm) -> str:
    """Send device memory from the node's rank 0 to its rank 1; return "" or what is wrong."""
    import cupy

    sent = cupy.arange(ELEMENTS, dtype=np.float32) + local.rank
    cupy.cuda.get_current_stream().synchronize()
    got: Any = cupy.empty_like(sent)
    local.Sendrecv(sent, 1 - local.rank, 99, got, 1 - local.rank, 99)
    right = bool((got == cupy.arange(ELEMENTS, dtype=np.float32) + 1 - local.rank).all())
    return "works" if right else "arrives wrong"


def judge(told: Sequence[Facts], job: Job) -> Finding:
    """Say who computes where, and how device arrays travel."""
    facts = [{"rank": rank, **one} for rank, one in enumerate(told)]
    having = [rank for rank, one in enumerate(told) if one["devices"]]
    broken = [rank for rank, one in enumerate(told) if one["error"]]
    if broken:
        words = f"CuPy finds no usable device ({who(broken)}): {told[broken[0]]['error']}"
        fix = 'Check the driver with nvidia-smi, or train with device="cpu"'
        return Finding("GPU", "note", words, fix, facts)
    if not having:
        driver = [rank for rank, one in enumerate(told) if one["driver"] and not one["cupy"]]
        if driver:
            fix = "Install the extra cuda12 or cuda13 of mpipar"
            return Finding("GPU", "note", f"a GPU, but no CuPy ({who(driver)})", fix, facts)
        return Finding("GPU", "ok", "none: the ranks compute on CPUs", "", facts)
    without = [rank for rank in range(len(told)) if rank not in having]
    if without:
        words = f"{who(without)} see no GPU, others do"
        fix = "Ask for one a rank: srun --gpus-per-task=1, and check CUDA_VISIBLE_DEVICES"
        return Finding("GPU", "problem", words, fix, facts)
    wrong = [rank for rank in having if told[rank]["probe"] == "arrives wrong"]
    if wrong:
        words = (
            f"the MPI library says that it takes device memory, but it arrives wrong ({who(wrong)})"
        )
        fix = "mpipar stages through host memory, so training is right; mend the library"
        return Finding("GPU", "problem", words, fix, facts)
    words = f"{who(having)}: {told[having[0]]['mine']}"
    aware = all(told[rank]["aware"] for rank in having)
    words += "; MPI is CUDA-aware" if aware else "; MPI is not CUDA-aware"
    direct = all(told[rank].get("direct", False) for rank in having)
    stages = "stages device arrays through host memory"
    words += f", mpipar {'gives it device arrays' if direct else stages}"
    for number, ranks in enumerate(job.nodes):
        used = {told[rank]["mine"] for rank in ranks}
        if len(used) < len(ranks) <= told[ranks[0]]["devices"]:
            words = f"ranks of {job.where(number)} share a GPU while others are idle"
            fix = "Give each its own: srun --gpus-per-task=1 --gpu-bind=single:1"
            return Finding("GPU", "problem", words, fix, facts)
        if len(used) < len(ranks):
            words += f"; {len(ranks)} ranks share {len(used)} on {job.where(number)}"
            return Finding("GPU", "note", words, "Start one rank a GPU", facts)
    return Finding("GPU", "ok", words, "", facts)


CHECK = Check("GPU", probe, judge)
