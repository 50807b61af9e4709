"""Training on a real GPU, which the ranks may share: the float32 losses of the CPU to 1e-4.

mpiexec -n 4 python -m pytest tests/gpu
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from tests.gpu.needs import cupy_or_skip

TINY = TrainConfig(layers=2, dim=64, heads=4, seq=64, batch=8, steps=5, seed=1, sample=0)


MESHES: list[dict[str, Any]] = [
    *({}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": "3"}, {"experts": 5}),
    {"experts": 4, "ep": 2, "capacity_factor": 0.7},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_are_those_of_the_cpu(mesh: dict[str, Any], tmp_path: Path) -> None:
    cupy_or_skip()
    world = MPI.COMM_WORLD
    if world.size % max([n for n in mesh.values() if isinstance(n, int)], default=1):
        pytest.skip("the mesh does not fit the number of ranks")
    path = Path(world.bcast(str(tmp_path / "text.txt")))
    if world.rank == 0:
        path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(300)))
    world.barrier()
    config = replace(TINY, data=str(path), **mesh)
    expected = train(config, world)
    rows = train(replace(config, device="cuda"), world)
    for row, right in zip(rows, expected, strict=True):
        for name in ("loss", "val_loss"):
            if name in right:
                assert row[name] == pytest.approx(right[name], rel=1e-4), (name, row["step"])
