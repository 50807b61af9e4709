"""DataParallel: gradients that stay between steps, steps that fail, and modules that change."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import ConfigError, StateError

TINY = 1e-6  # of a bucket, in 2^20 bytes: one parameter each


@pytest.fixture(params=["1", "0"], ids=["shared", "private"])
def comm(
    raw: MPI.Intracomm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mp.Communicator]:
    """A group whose ranks share buckets, or do not."""
    monkeypatch.setenv("MPIPAR_WINDOWS", request.param)
    Fuse.blown = False
    with mp.Communicator(raw, timeout=30.0) as made:
        yield made


class Fuse(mp.Function):
    """The identity; its backward raises where it is `blown`."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: np.ndarray) -> np.ndarray:
        return x.copy()

    @staticmethod
    def backward(ctx: Any, grad: np.ndarray) -> np.ndarray:
        if Fuse.blown:
            raise ZeroDivisionError
        return grad


class Net(mp.nn.Module):
    """Two layers with a fuse between them, and a weight that only some losses use."""

    def __init__(self) -> None:
        self.a = mp.nn.Linear(3, 4, seed=1, name="a", dtype="float64")
        self.b = mp.nn.Linear(4, 2, seed=2, name="b", dtype="float64")
        self.c = mp.nn.Parameter(np.ones(5))

    def forward(self, x: np.ndarray, c: bool = False) -> Any:
        loss = (self.b(Fuse.apply(self.a(x).tanh())) ** 2.0).sum()
        return loss + (self.c * self.c * x[0, 0]).sum() if c else loss


def batch(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng((rank, step)).standard_normal((5, 3))


def gradients(net: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.copy() for p in net.parameters()]


def of_all(p: int, op: str, step: int, who: Any = None) -> list[Any]:
    """Return the gradients of one process with the batches of all ranks; `who` use c."""
    net = Net()
    for rank in range(p):
        (net(batch(rank, step), who == rank) * (1 / p if op == "mean" else 1.0)).backward()
    return gradients(net)


def total(*terms: list[Any]) -> list[Any]:
    """Return the sum of lists of gradients; None is nothing."""
    sums = []
    for several in zip(*terms, strict=True):
        there = [grad for grad in several if grad is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    return sums


def same(net: Any, right: list[Any]) -> None:
    for param, expected in zip(net.parameters(), right, strict=True):
        assert (param.grad is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(param.grad, expected, rtol=1e-11, atol=1e-13)


def alike(comm: mp.Communicator, net: Any) -> None:
    """Assert that gradients have the same bits on all ranks."""
    for param in net.parameters():
        if param.grad is not None:
            first = np.asarray(comm.broadcast(np.array(param.grad), src=0))
            assert first.tobytes() == param.grad.tobytes()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_what_is_reduced_is_not_reduced_again(comm: mp.Communicator, op: str) -> None:
    p, r = comm.size, comm.rank
    with mp.DataParallel(Net(), comm, op=op, bucket_mb=TINY) as net:
        right = of_all(p, op, 0, who=0)
        net(batch(r, 0), r == 0).backward()
        same(net, right)
        for step in range(1, 4):
            net(batch(r, step), step == 2 and r == p - 1).backward()
            right = total(right, of_all(p, op, step, who=p - 1 if step == 2 else None))
            same(net, right)
            alike(comm, net)
        mp.clip_grad_norm(net.parameters(), 1e-3)
        clipped = gradients(net)
        net.c.grad = clipped[0] = None
        net(batch(r, 4)).backward()
        same(net, total(clipped, of_all(p, op, 4)))
        for clear in (False, True):  # in the middle of a step
            before = gradients(net)
            with net.no_sync():
                net(batch(r, 5)).backward()
            if clear:
                net.zero_grad()
                net(batch(r, 6)).backward()
                same(net, of_all(p, op, 6))
            else:
                net(batch(r, 6)).backward()
                same(net, total(before, of_all(p, op, 5), of_all(p, op, 6)))
        alike(comm, net)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_accumulation_on_top_of_a_result(comm: mp.Communicator, op: str) -> None:
    """The new gradients alone are divided by the number of steps."""
    with mp.DataParallel(Net(), comm, op=op, accumulation_steps=2) as net:
        for step in range(4):
            net(batch(comm.rank, step)).backward()
        terms = [of_all(comm.size, op, step) for step in range(4)]
        same(net, [None if g is None else g / 2 for g in total(*terms)])


def test_a_backward_of_something_else_changes_nothing(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm, op="sum") as net:
        net(batch(comm.rank, 0)).backward()
        before = [param.grad for param in net.parameters()]
        other = mp.Tensor(np.ones(2), requires_grad=True)
        other.sum().backward()
        assert all(p.grad is old for p, old in zip(net.parameters(), before, strict=True))
        net(batch(comm.rank, 1))
        (other * 2.0).sum().backward()  # nobody used the module: its backward is still to come
        same(net, of_all(comm.size, "sum", 0))


@pytest.mark.parametrize("who", ["all", "first", "last"])
def test_after_a_backward_that_raised(comm: mp.Communicator, who: str) -> None:
    """All ranks get an error, keep what they had, and can go on."""
    p, r = comm.size, comm.rank
    blown = {"all": True, "first": r == 0, "last": r == p - 1}[who]
    with mp.DataParallel(Net(), comm, bucket_mb=TINY) as net:
        for step in range(4):
            before = gradients(net) if step % 2 else None
            if before is None:
                net.zero_grad()
            loss = net(batch(r, step))
            Fuse.blown = blown
            begun = time.monotonic()
            with pytest.raises(ZeroDivisionError if blown else StateError) as caught:
                loss.backward()
            assert time.monotonic() - begun < 20
            if not blown:
                assert f"rank {0 if who == 'first' else p - 1}" in str(caught.value)
            Fuse.blown = False
            same(net, before or [None] * 5)
            net(batch(r, step)).backward()
            same(net, total(before or [None] * 5, of_all(p, "mean", step)))
            alike(comm, net)


def test_a_rank_without_a_loss(comm: mp.Communicator) -> None:
    p, r = comm.size, comm.rank
    with mp.DataParallel(Net(), comm, op="sum") as net:
        for step in range(2):
            net.zero_grad()
            if r == 0:
                net(batch(0, step)).backward()
            elif step:
                mp.backward()
            else:
                mp.Tensor(0.0).backward()
            alone = Net()
            alone(batch(0, step)).backward()
            same(net, gradients(alone))
        with mp.DataParallel(Net(), comm) as other:
            if p > 1:
                with pytest.raises(StateError, match="one of 2"):
                    mp.backward()
            if r == 0:
                other(batch(0, 0)).backward()
            else:
                other(batch(r, 0))
                mp.backward()
            assert other.a.weight.grad is not None


@pytest.mark.parametrize("how", ["unfrozen", "replaced"])
def test_parameters_that_nobody_would_reduce(comm: mp.Communicator, how: str) -> None:
    module = Net()
    module.c.requires_grad = False
    with mp.DataParallel(module, comm) as net:
        net(batch(comm.rank, 0)).backward()
        if how == "unfrozen":
            module.c.requires_grad = True
        else:
            module.c = mp.nn.Parameter(np.full(5, float(comm.rank)))
        with pytest.raises(StateError, match=r"\['c'\].*wrap the module again"):
            net(batch(comm.rank, 0))
    net = mp.DataParallel(module, comm)
    assert (module.c.data == module.c.data[0]).all()
    net.zero_grad()
    net(np.full((1, 3), comm.rank + 1.0), True).backward()
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(module.c.grad, 2 * module.c.data * mean)
    net.destroy()


def unequal_steps(net: Any, steps: int, where: str) -> None:
    """Run steps in a join block, of which the second one raises."""
    with net.join():
        for step in range(steps):
            net.zero_grad()
            if step == 1 and where in ("between", "forward"):
                if where == "forward":
                    net(batch(net.comm.rank, step))
                raise ZeroDivisionError
            Fuse.blown = step == 1 and where == "backward"
            net(batch(net.comm.rank, step)).backward()


@pytest.mark.parametrize("where", ["between", "forward", "backward"])
def test_an_error_that_leaves_the_join_block_is_told(comm: mp.Communicator, where: str) -> None:
    """Others that are in a step, or wait for the end, raise within seconds; then all go on."""
    p, r = comm.size, comm.rank
    begun = time.monotonic()
    with mp.DataParallel(Net(), comm, bucket_mb=TINY) as net:
        net(batch(r, 0)).backward()
        net.zero_grad()
        net(batch(r, 0)).backward()
        with pytest.raises(ZeroDivisionError if r == p - 1 else StateError):
            unequal_steps(net, 3 if r or p == 1 else 1, where if r == p - 1 else "")
        Fuse.blown = False
        net.zero_grad()
        net(batch(r, 7)).backward()
        same(net, of_all(p, "mean", 7))
    assert time.monotonic() - begun < 20


def test_what_is_no_module_or_no_communicator(comm: mp.Communicator) -> None:
    with pytest.raises(ConfigError, match="module"):
        mp.DataParallel(3, comm)
    for wrong in (MPI.COMM_WORLD, None):
        with pytest.raises(ConfigError, match="comm="):
            mp.DataParallel(Net(), wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="comm="):
            mp.PowerSGD(Net(), wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="comm="):
            mp.GradientSynchronizer(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="comm="):
            mp.sum_gradients(Net().parameters(), wrong)  # type: ignore[arg-type]


def test_powersgd_after_a_reduced_backward(comm: mp.Communicator) -> None:
    """Results that a node shares cannot be written: PowerSGD leaves arrays of its own."""
    with mp.DataParallel(Net(), comm) as net:
        compressed = mp.PowerSGD(net.parameters(), comm, rank=4, min_compression_rate=0)
        for step in range(2):
            net.zero_grad()
            net(batch(comm.rank, step)).backward()
            compressed.sync()
            same(net, of_all(comm.size, "mean", step))
        weight = net.a.weight
        with pytest.raises(ConfigError, match="once"):
            mp.PowerSGD([weight, weight], comm)
