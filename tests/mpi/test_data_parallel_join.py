"""Ranks with unequal numbers of batches: the mean is over the batches there were."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp


@pytest.fixture(params=["1", "0"], ids=["shared", "private"])
def comm(
    raw: MPI.Intracomm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mp.Communicator]:
    """A group whose ranks share buckets, or do not."""
    monkeypatch.setenv("MPIPAR_WINDOWS", request.param)
    with mp.Communicator(raw) as made:
        yield made


class Net(mp.nn.Module):
    """Two weights that see each other, so that the order of buckets matters."""

    def __init__(self) -> None:
        self.a = mp.nn.Linear(3, 4, seed=1, name="a", dtype="float64")
        self.b = mp.nn.Linear(4, 2, seed=2, name="b", dtype="float64")

    def forward(self, x: Any) -> Any:
        return (self.b(self.a(x).tanh()) ** 2.0).sum()


def batch(rank: int, number: int) -> np.ndarray:
    return np.random.default_rng((rank, number)).standard_normal((5, 3))


def train_alone(batches: list[int], steps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return weights and last gradients of one process that averages over `steps` batches a rank.

    Every `steps` batches of each rank make a step, as long as it has some.
    """
    net = Net()
    optimizer = mp.optim.SGD(net.parameters(), lr=0.05)
    for first in range(0, max(batches), steps):
        there = [(r, n) for r, m in enumerate(batches) for n in range(first, min(first + steps, m))]
        optimizer.zero_grad()
        for rank, number in there:
            (net(mp.Tensor(batch(rank, number))) * (1.0 / len(there))).backward()
        if any(m >= first + steps for m in batches):  # else nobody steps any more
            optimizer.step()
    params = net.parameters()
    return [param.data for param in params], [param.grad for param in params]


def train_together(
    comm: mp.Communicator, batches: list[int], steps: int, bucket_mb: float
) -> mp.DataParallel:
    net = mp.DataParallel(Net(), comm, accumulation_steps=steps, bucket_mb=bucket_mb)
    optimizer = mp.optim.SGD(net.parameters(), lr=0.05)
    with net.join():
        for number in range(batches[comm.rank]):
            if number % steps == 0:
                optimizer.zero_grad()
            net(mp.Tensor(batch(comm.rank, number))).backward()
            if number % steps == steps - 1:
                optimizer.step()
    return net


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
@pytest.mark.parametrize(
    ("batches", "steps"),
    [
        ([3, 2, 2, 3], 1),
        ([2, 3, 1, 0], 1),  # rank 0 is not the last one
        ([0, 1, 4, 2], 1),
        ([2, 2, 2, 2], 1),
        ([0, 0, 0, 0], 1),
        ([5, 2, 3, 4], 2),  # some leave in the middle of an accumulation
        ([4, 2, 1, 3], 2),
    ],
)
def test_unequal_numbers_of_batches(
    comm: mp.Communicator, batches: list[int], steps: int, bucket_mb: float
) -> None:
    batches = batches[: comm.size]
    if comm.size == 1 and batches[0] % steps:
        batches = [batches[0] + 1]  # the rest of an accumulation is sent only when others listen
    net = train_together(comm, batches, steps, bucket_mb)
    weights, gradients = train_alone(batches, steps)
    for param, weight, gradient in zip(net.parameters(), weights, gradients, strict=True):
        np.testing.assert_allclose(param.data, weight, rtol=1e-12, atol=1e-14)
        if gradient is None:
            assert param.grad is None
        else:
            np.testing.assert_allclose(param.grad, gradient, rtol=1e-12, atol=1e-14)
    net.destroy()


def test_after_the_block_all_ranks_count_again(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm) as net:
        for _ in range(2):
            with net.join():
                for number in range(1 + comm.rank):
                    net.zero_grad()
                    net(mp.Tensor(batch(comm.rank, number))).backward()
            net.zero_grad()
            net(mp.Tensor(np.ones((1, 3)))).backward()
            alone = Net()
            alone(mp.Tensor(np.ones((1, 3)))).backward()
            for param, right in zip(net.parameters(), alone.parameters(), strict=True):
                np.testing.assert_allclose(param.grad, right.grad, rtol=1e-12)


def test_the_divisor_of_narrow_gradients(comm: mp.Communicator) -> None:
    """16-bit sums are divided by the group first, so that they do not overflow, then corrected."""

    class Weight(mp.nn.Module):
        def __init__(self) -> None:
            self.w = mp.nn.Parameter(np.ones(8, np.float32))

        def forward(self, x: float) -> Any:
            return (self.w * x).sum()

    with mp.DataParallel(Weight(), comm, wire_dtype="float16") as net:
        with net.join():
            for _ in range(1 if comm.rank else 2):
                net.zero_grad()
                net(30000.0).backward()
        np.testing.assert_allclose(net.w.grad, np.full(8, 30000.0), rtol=2e-3)


def test_an_error_in_the_block_is_not_waited_for(comm: mp.Communicator) -> None:
    net = mp.DataParallel(Net(), comm)
    with pytest.raises(ZeroDivisionError), net.join():
        raise ZeroDivisionError
    net.destroy()
