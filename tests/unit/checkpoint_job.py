"""A job that saves again and again until it is killed: FOLDER, sync or async.

Every rank fills its arrays with the number of the step, and prints it when it is saved.
"""

import sys

import numpy as np
from mpi4py import MPI

import mpipar as mp


def main(folder: str, how: str) -> None:
    """Save steps 1, 2, 3.. over all ranks."""
    with mp.Mesh(MPI.COMM_WORLD) as mesh:
        spec = mp.Spec.replicated("w", (400, 300)).shard("tp", 1, mesh.world.rank, mesh.world.size)
        weight = mp.nn.Parameter(np.zeros(spec.local_shape), spec)
        whole = np.zeros(100_000)
        tree = {"model": {"w": weight, "whole": whole}}
        for step in range(1, 10_000):
            weight.data[...] = whole[...] = step
            state = {"step": step}
            mp.save(
                folder, {**tree, "state": state}, mesh, step=step, keep=2, async_op=how == "async"
            )
            if mesh.world.rank == 0:
                print(step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
