"""check=True: what does not belong together is one error on all ranks together."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp


@pytest.fixture
def comm(world: MPI.Intracomm) -> Any:
    with mp.Communicator(world, check=True, name="checked") as made:
        yield made


def last(comm: mp.Communicator) -> bool:
    """Whether this rank is the odd one out."""
    return comm.rank == comm.size - 1 > 0


CASES = {
    "shape": lambda c: c.all_reduce(np.ones(3 + last(c))),
    "dtype": lambda c: c.all_reduce(np.ones(3, np.float32 if last(c) else np.float64)),
    "operation": lambda c: c.all_reduce(np.ones(3), op="max" if last(c) else "sum"),
    "order": lambda c: c.all_gather(np.ones(3)) if last(c) else c.all_reduce(np.ones(3)),
    "dimension": lambda c: c.all_gather(np.ones((2, 2)), dim=int(last(c))),
    "root": lambda c: c.reduce(np.ones(3), dst=int(last(c))),
    "offset": lambda c: c.shift(np.ones(3), 1 + last(c)),
    "one rank's own error": lambda c: c.all_reduce(np.ones(3), op="median" if last(c) else "sum"),
    "one rank's out": lambda c: c.all_reduce(np.ones(3), out=np.ones(3 + last(c))),
    "sizes": lambda c: c.all_gather(np.ones(3), sizes=(3 + last(c),) * c.size),
    "source": lambda c: c.broadcast(np.ones(3), src=int(last(c))),
    "template": lambda c: c.broadcast(np.ones(3 + last(c)), src=0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mismatch_is_an_error_on_every_rank(comm: mp.Communicator, name: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    kind = TypeError if name == "dtype" else ValueError
    with pytest.raises(kind) as caught:
        CASES[name](comm)
    text = str(caught.value)
    if "own" not in name and "out" not in name:
        assert "rank" in text
    assert comm.all_reduce(np.ones(2))[0] == comm.size  # all ranks may go on


def test_the_message_names_ranks_and_shapes(comm: mp.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(ValueError, match=r"shape \(3,\).*; rank .*shape \(4,\)"):
        comm.all_reduce(np.ones(3 + last(comm)))


def test_right_calls_pass(comm: mp.Communicator) -> None:
    p, r = comm.size, comm.rank
    assert comm.all_gather(np.ones(r + 1), sizes="exchange").size == p * (p + 1) // 2
    assert comm.gather(np.ones(r + 1)) is None or r == 0
    assert comm.broadcast(np.ones(2) if r == 0 else None).size == 2
    assert comm.scatter(np.arange(8.0) if r == 0 else None).size in (2, 3, 4, 8)
    comm.all_to_all(np.ones((p, p)), 0, 1)
    comm.reduce_scatter(np.ones((2, 9)))
    comm.barrier()
    t = mp.Tensor(np.ones(3), requires_grad=True)
    comm.all_reduce(t).sum().backward()
    np.testing.assert_array_equal(t.grad, np.full(3, p))
