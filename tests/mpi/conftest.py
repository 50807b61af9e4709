"""Fixtures of the tests that run on all ranks at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.autograd import Tape
from mpipar.comm import report
from mpipar.comm.run import synchronous_sends
from mpipar.kernels.native import compile_cpu
from tests.ranks.plugin import failed_here

report.GRACE = 0.2  # where a rank fails alone on purpose, the others have nothing to write


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


# on 1 rank all are the same; on 2 and 3 a half is one rank alone; one alone sends nothing
GROUPS = {1: ["world"], 2: ["world", "half"], 3: ["world", "half"]}
MANY = ["world", "half"] if synchronous_sends else ["self", "world", "half"]


@pytest.fixture(params=GROUPS.get(MPI.COMM_WORLD.size, MANY))
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
def comm(raw: MPI.Intracomm) -> Iterator[mp.Communicator]:
    """A Communicator over `raw`; what a test records goes with it."""
    with mp.Communicator(raw) as made, Tape():
        yield made


@pytest.fixture
def shared_path(world: MPI.Intracomm, tmp_path: Path) -> Path:
    """A folder, new and empty, that all ranks share."""
    path: Path = world.bcast(tmp_path)
    return path


@pytest.fixture
def text(shared_path: Path, world: MPI.Intracomm) -> str:
    """The path of a short text that all ranks read."""
    path = shared_path / "text.txt"
    if world.rank == 0:
        path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(300)))
    world.barrier()
    return str(path)
