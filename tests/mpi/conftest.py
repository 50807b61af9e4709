"""Fixtures of the tests that run on all ranks at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from mpipar.kernels.native import compile_cpu
from tests.ranks.plugin import failed_here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder; compile what kernels need before a test's time counts."""
    compile_cpu()
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def world() -> MPI.Intracomm:
    """The raw communicator of all ranks."""
    return MPI.COMM_WORLD


@pytest.fixture(params=["self", "world", "half"])
def raw(request: pytest.FixtureRequest, world: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """A raw communicator: this rank alone, all ranks, or half of them.

    The halves are the even and the odd ranks, so that ranks in a half are not those of the world:

        world   0 1 2 3        half   0 . 1 .   and   . 0 . 1
    """
    if request.param == "self":
        made: MPI.Intracomm = MPI.COMM_SELF.Dup()
    elif request.param == "world":
        made = world.Dup()
    else:
        made = MPI.Intracomm(world.Split(color=world.rank % 2, key=world.rank))
    yield made
    if not request.node.stash.get(failed_here, False):  # messages may be left in a failed one
        made.Free()


@pytest.fixture
def shared_path(world: MPI.Intracomm, tmp_path: Path) -> Path:
    """A folder, new and empty, that all ranks share."""
    path: Path = world.bcast(tmp_path)
    return path
