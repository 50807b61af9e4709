"""Jobs that believe to run on several nodes: local ranks, and the two-level all_reduce."""

import pytest

from tests.launch import launch

CODE = """
import numpy as np, mpipar as mp
from mpi4py import MPI
with mp.Communicator(MPI.COMM_WORLD) as comm:
    nodes = comm.process_group.nodes
    x = np.arange(50_000.0) * (comm.rank + 1)
    total = x[1] * 0 + sum(range(1, comm.size + 1))
    for algorithm in mp.algorithms("all_reduce"):
        y = comm.all_reduce(x, algorithm=algorithm)
        np.testing.assert_allclose(y, np.arange(50_000.0) * total, rtol=1e-12)
    comm.all_reduce(x)
    what = comm.process_group.flight.records[-1].what
    mine = (nodes.local_rank, nodes.local_size, nodes.sizes, "hierarchical" in what)
    everyone = MPI.COMM_WORLD.gather(mine)
    if comm.rank == 0:
        print(everyone)
"""

LAYOUTS = {
    "0,0,1,1": ([0, 1, 0, 1], [2, 2, 2, 2], (2, 2), True),
    "0,0,0,1": ([0, 1, 2, 0], [3, 3, 3, 1], (3, 1), True),
    "7,3,3,3": ([0, 0, 1, 2], [1, 3, 3, 3], (1, 3), True),
    "0,1,0,1": ([0, 0, 1, 1], [2, 2, 2, 2], None, False),  # not consecutive: one level
    "0,1,2,3": ([0, 0, 0, 0], [1, 1, 1, 1], (1, 1, 1, 1), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str) -> None:
    local_ranks, local_sizes, sizes, two_level = LAYOUTS[layout]
    result = launch(4, ["-c", CODE], timeout=60, env={"MPIPAR_FAKE_NODES": layout})
    assert result.returncode == 0, result.stderr
    expected = [(r, s, sizes, two_level) for r, s in zip(local_ranks, local_sizes, strict=True)]
    assert str(expected) in result.stdout
