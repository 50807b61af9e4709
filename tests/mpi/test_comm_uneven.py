"""Messages whose sizes differ from rank to rank: shifts, exchanges of rows; and how ranks agree."""

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.comm import collectives
from mpipar.comm.agreement import agree
from mpipar.errors import BufferMismatchError, ConfigError, MismatchError
from mpipar.parallel.communicator import Communicator


@pytest.fixture(params=[False, True], ids=["", "check"])
def comm(raw: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with Communicator(raw, check=request.param) as made:
        yield made


def rows(rank: int, n: int) -> np.ndarray:
    return 100.0 * rank + np.arange(n * 3.0).reshape(n, 3)


def test_shift_of_uneven_blocks(comm: Communicator) -> None:
    p, r = comm.size, comm.rank
    for offset in (-1, 0, 1, 2):
        for sizes in (tuple(range(p)), tuple(40_000 + rank for rank in range(p))):
            source = (r - offset) % p
            args = comm.process_group, rows(r, sizes[r]), offset, None, None
            got = collectives.shift(*args, True, 0, sizes).wait()
            np.testing.assert_array_equal(got, rows(source, sizes[source]))
            got = collectives.shift(*args, False, 0, sizes)
            np.testing.assert_array_equal(got, rows(source, sizes[source]))


def test_shift_checks_the_sizes(comm: Communicator) -> None:
    sizes = (2,) * comm.size
    with pytest.raises((BufferMismatchError, MismatchError)):
        collectives.shift(comm.process_group, rows(0, 3), 1, None, None, False, 0, sizes)


@pytest.mark.parametrize("scale", [1, 7_000])
def test_exchange_of_any_numbers_of_rows(comm: Communicator, scale: int) -> None:
    p, r = comm.size, comm.rank
    for seed in range(4):
        counts = np.random.default_rng(seed).integers(0, 4, (p, p)) * scale
        counts[:, seed % p] *= seed > 1  # nobody sends there
        sent = [rows(i * p + j, counts[i, j]) for i in range(p) for j in range(p)]
        x = np.concatenate(sent[r * p : r * p + p])
        got = collectives.exchange(comm.process_group, x, counts.tolist())
        np.testing.assert_array_equal(got, np.concatenate(sent[r::p]))
    kept = len(comm.process_group._prepared)
    collectives.exchange(comm.process_group, x, counts.tolist())
    assert len(comm.process_group._prepared) == kept  # plans of one call are not kept


def test_exchange_refuses_other_rows(comm: Communicator) -> None:
    counts = [[1] * comm.size] * comm.size
    with pytest.raises((BufferMismatchError, MismatchError)):
        collectives.exchange(comm.process_group, rows(0, comm.size + 1), counts)


def test_ranks_tell_each_other_numbers(comm: Communicator) -> None:
    facts = {"heads": 4, "length": 10 + comm.rank}
    table = agree(comm.process_group, "test", facts, {"length"})
    assert table == {
        "heads": (4,) * comm.size,
        "length": tuple(10 + rank for rank in range(comm.size)),
    }


def test_all_ranks_raise_together(comm: Communicator) -> None:
    group, last = comm.process_group, comm.rank == comm.size - 1
    with pytest.raises(ConfigError, match="layout"):
        agree(group, "test", {"x": 1}, problem=ConfigError("layout=3") if last else None)
    if comm.size > 1:
        with pytest.raises(MismatchError, match=f"rank {comm.size - 1}: x=2"):
            agree(group, "test", {"x": 1 + last, "y": 3})
    assert agree(group, "test", {"x": 1}) == {"x": (1,) * comm.size}
