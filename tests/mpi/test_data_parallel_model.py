"""DataParallel: the gradients are those of one process with the whole batch."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.errors import BufferMismatchError, ConfigError, MismatchError, StateError
from mpipar.optim import AdamW
from mpipar.partition import block

ROWS = 12  # of the whole batch: each of 1, 2, 3, 4 ranks gets equally many


@pytest.fixture(params=["1", "0"], ids=["shared", "private"])
def comm(
    raw: MPI.Intracomm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mp.Communicator]:
    """A group whose ranks share buckets, or do not."""
    monkeypatch.setenv("MPIPAR_WINDOWS", request.param)
    with mp.Communicator(raw) as made:
        yield made


class Net(mp.nn.Module):
    """A tied weight, one of exactly 1 KB, one without elements, and a scalar."""

    def __init__(self, seed: int = 0) -> None:
        self.up = mp.nn.Linear(6, 16, seed=seed, name="up", dtype="float64")
        self.tied = mp.nn.Linear(16, 8, bias=False, seed=seed, name="tied", dtype="float64")
        self.again = self.tied
        self.norm = mp.nn.LayerNorm(8, dtype="float64")
        self.scale = mp.nn.Parameter(np.array(1.5))
        self.nothing = mp.nn.Parameter(np.zeros((2, 0)))
        self.never = mp.nn.Parameter(np.zeros(3))

    def forward(self, x: Any) -> Any:
        h = self.tied(self.up(x).tanh())
        h = self.again(mp.functional.cat([h, h * self.scale], -1).tanh())
        return self.norm(h) + self.nothing.sum()


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((ROWS, 6)), rng.standard_normal((ROWS, 8))


def loss_of(net: Any, rows: slice) -> Any:
    """Return the mean over these rows."""
    x, y = data()
    error = net(mp.Tensor(x[rows])) - y[rows]
    return (error * error).mean()


def mine(comm: mp.Communicator) -> slice:
    return block(ROWS, comm.size, comm.rank)


def whole(rows: slice = slice(0, ROWS)) -> list[Any]:
    net = Net()
    loss_of(net, rows).backward()
    return [param.grad for param in net.parameters()]


def assert_gradients(net: Any, expected: list[Any], factor: float = 1.0) -> None:
    for param, right in zip(net.parameters(), expected, strict=True):
        if right is None:
            assert param.grad is None
        else:
            np.testing.assert_allclose(param.grad, factor * right, rtol=1e-12, atol=1e-14)


def from_bucket(param: Any) -> bool:
    """Whether the gradient is a view of a bucket: one of its own, or one of the node's."""
    return param.grad is param.home or not param.grad.flags.writeable


@pytest.mark.parametrize(
    ("bucket_mb", "parts"), [(25, 1), (2**-10, 1), (2**-20, 1), (25, 3), (2**-10, 3)]
)
def test_five_steps_are_those_of_one_rank(
    comm: mp.Communicator, bucket_mb: float, parts: int
) -> None:
    """The parts of a step have gradients of different sizes, whose mean is that of the batch."""
    alone = Net()
    net = mp.DataParallel(Net(), comm, accumulation_steps=parts, bucket_mb=bucket_mb)
    first = AdamW(alone.parameters(), lr=0.01)
    second = AdamW(net.parameters(), lr=0.01)
    for step in range(5):
        first.zero_grad()
        loss_of(alone, slice(0, ROWS)).backward()
        loss = loss_of(net, mine(comm))
        second.zero_grad()  # between forward and backward: it makes no difference
        for part in range(1, parts + 1):
            loss = loss_of(net, mine(comm)) if part > 1 else loss
            (loss * (2 * part / (parts + 1))).backward()
        assert_gradients(net, [param.grad for param in alone.parameters()])
        first.step()
        second.step()
        for ours, right in zip(net.parameters(), alone.parameters(), strict=True):
            np.testing.assert_allclose(ours.data, right.data, rtol=1e-12, atol=1e-14)
        if step:  # nothing was copied out of the buckets
            assert all(from_bucket(p) for p in net.parameters() if p.grad is not None)
    net.destroy()
    net.destroy()


def test_the_state_is_that_of_rank_0(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(seed=comm.rank), comm) as net:
        for ours, right in zip(net.parameters(), Net(seed=0).parameters(), strict=True):
            np.testing.assert_array_equal(ours.data, right.data)
        assert list(net.state_dict()) == list(Net().state_dict())
        net.load_state_dict(Net(seed=9).state_dict())
        np.testing.assert_array_equal(net.up.weight.data, Net(seed=9).up.weight.data)
        assert net.eval() is net
        assert not net.module.training
        assert net.train().module.tied.training
        with pytest.raises(AttributeError, match=r"Net.*nowhere"):
            _ = net.nowhere


def test_the_sum_of_losses_that_are_terms_of_one_mean(comm: mp.Communicator) -> None:
    """Micro-batches of unequal sizes; the last backward sends."""
    x, y = data()
    with mp.DataParallel(Net(), comm, op="sum") as net:
        cuts = np.linspace(0, ROWS, 2 * comm.size + 2).astype(int)  # 2 a rank; rank 0 has 3
        parts = list(pairwise(cuts))
        own = parts[2 * comm.rank : 2 * comm.rank + 2]
        own[0:0] = parts[-1:] if comm.rank == 0 else [(0, 0)]
        for number, (start, stop) in enumerate(own):
            error = net.forward(mp.Tensor(x[start:stop])) - y[start:stop]
            share = mp.token_mean((error * error).sum(), error.size, comm, total=ROWS * 8)
            if number < 2:
                with net.no_sync():
                    before = comm.calls["all_reduce"]
                    share.backward()
                    assert comm.calls["all_reduce"] == before
            else:
                share.backward()
        assert_gradients(net, whole())


def test_no_sync_adds_up(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm) as net:
        with net.no_sync():
            loss_of(net, mine(comm)).backward()
            assert_gradients(net, whole(mine(comm)))
            loss_of(net, mine(comm)).backward()
        loss_of(net, mine(comm)).backward()
        assert_gradients(net, whole(), 3.0)
        loss_of(net, mine(comm)).backward()  # the gradients were not cleared: one more is added
        assert_gradients(net, whole(), 4.0)


def test_used_under_no_sync_only(comm: mp.Communicator) -> None:
    class Two(mp.nn.Module):
        def __init__(self) -> None:
            self.a, self.b = mp.nn.Parameter(np.ones(3)), mp.nn.Parameter(np.ones(3))

        def forward(self, name: str) -> Any:
            return getattr(self, name).sum()

    with mp.DataParallel(Two(), comm) as net:
        with net.no_sync():
            net("a").backward()
        assert net.b.grad is None
        net("b").backward()
        np.testing.assert_allclose(net.a.grad, np.ones(3))
        np.testing.assert_allclose(net.b.grad, np.ones(3))


@pytest.mark.parametrize("steps", [1, 3])
def test_accumulation_is_the_mean(comm: mp.Communicator, steps: int) -> None:
    with mp.DataParallel(Net(), comm, accumulation_steps=steps) as net:
        for _ in range(2):
            net.zero_grad()
            for part in range(steps):
                own = mine(comm)
                cut = block(own.stop - own.start, steps, part)
                if (own.stop - own.start) % steps:
                    cut = slice(0, own.stop - own.start)
                before = comm.calls["all_reduce"]
                loss_of(net, slice(own.start + cut.start, own.start + cut.stop)).backward()
                silent = comm.size == 1 or part < steps - 1
                assert (comm.calls["all_reduce"] == before) == silent
            assert_gradients(net, whole())


def test_accumulation_by_hand(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm, accumulation_steps=2, op="mean") as net:
        with pytest.raises(StateError, match="start_accumulation"):
            net.accumulate_gradients()
        for _ in range(2):
            net.start_accumulation()
            for last in (False, True):
                loss_of(net, mine(comm)).backward()
                assert net.accumulate_gradients() is last
            assert_gradients(net, whole())
            with pytest.raises(StateError, match="not started"):
                net.accumulate_gradients()
        local = whole(mine(comm))
        names = [name for name, _ in net.named_parameters()]
        named = {n: g for n, g in zip(names, local, strict=True) if g is not None}
        net.start_accumulation()
        assert not net.accumulate_gradients(local)
        assert net.accumulate_gradients(named)
        assert_gradients(net, whole())
        net.start_accumulation()
        with pytest.raises(BufferMismatchError, match=r"len\(gradients\)=1"):
            net.accumulate_gradients(local[:1])
        with pytest.raises(BufferMismatchError, match=r"up\.weight=\(6, 16\).*\(16, 6\)"):
            net.accumulate_gradients({"up.weight": np.ones((6, 16))})


class Choice(mp.nn.Module):
    """Uses one of two weights, or none."""

    def __init__(self) -> None:
        self.w1 = mp.nn.Parameter(np.full(4, 2.0))
        self.w2 = mp.nn.Parameter(np.full(4, 3.0))

    def forward(self, which: int) -> Any:
        return ((self.w1, self.w2, mp.Tensor(np.ones(4)))[which] * 6.0).sum()


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_ranks_use_different_weights(comm: mp.Communicator, bucket_mb: float) -> None:
    with mp.DataParallel(Choice(), comm, bucket_mb=bucket_mb) as net:
        for _ in range(3):
            net.zero_grad()
            net(min(comm.rank, 2)).backward()  # from rank 2 on nothing is used
            np.testing.assert_allclose(net.w1.grad, np.full(4, 6.0 / comm.size))
            if comm.size > 1:
                np.testing.assert_allclose(net.w2.grad, np.full(4, 6.0 / comm.size))
            else:
                assert net.w2.grad is None


def test_a_backward_of_something_else_comes_first(comm: mp.Communicator) -> None:
    """Two models forward, then one backward each; and two backwards of one forward."""
    with mp.DataParallel(Choice(), comm) as a, mp.DataParallel(Choice(), comm) as b:
        for _ in range(2):
            loss_a, loss_b = a(0), b(1)
            a.zero_grad()
            b.zero_grad()
            loss_a.backward()
            assert b.w2.grad is None
            loss_b.backward()
            np.testing.assert_allclose(a.w1.grad, np.full(4, 6.0))
            np.testing.assert_allclose(b.w2.grad, np.full(4, 6.0))
            assert a.w2.grad is None
        one, two = a(0), a(1)
        a.zero_grad()
        one.backward()
        two.backward()
        np.testing.assert_allclose(a.w1.grad, np.full(4, 6.0))
        np.testing.assert_allclose(a.w2.grad, np.full(4, 6.0))


def test_one_rank_looks_at_its_model(comm: mp.Communicator) -> None:
    """A forward in evaluation, on one rank, does not make it wait for the others."""
    with mp.DataParallel(Choice(), comm) as net:
        if comm.rank == 0:
            net.eval()(0)
            net.train()
        other = mp.Tensor(np.ones(2), requires_grad=True)
        other.sum().backward()
        assert net.w1.grad is None


def test_recomputed_parts(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm, bucket_mb=2**-10) as net:
        for _ in range(2):
            net.zero_grad()
            x, y = data()
            out = mp.recompute(net, mp.Tensor(x[mine(comm)]))
            ((out - y[mine(comm)]) ** 2.0).mean().backward()
            assert_gradients(net, whole())


def test_buckets_travel_during_backward(world: MPI.Intracomm) -> None:
    """With one parameter a bucket, the first all-reduces start before backward is at its end."""
    with mp.Communicator(world) as comm, mp.DataParallel(Net(), comm, bucket_mb=1e-6) as net:
        for _ in range(2):  # buckets are laid out anew after the first; the next starts none early
            loss_of(net, mine(comm)).backward()
        seen: list[int] = []
        before = comm.calls["all_reduce"]
        handle = mp.add_pump(lambda: seen.append(comm.calls["all_reduce"] - before))
        loss_of(net, mine(comm)).backward()
        handle.remove()
        sent = comm.calls["all_reduce"] - before
        assert sent == (0 if comm.size == 1 else 7 + 1)  # `nothing` is not sent
        assert comm.size == 1 or 0 < seen[-2] < sent


def test_frozen_parameters_are_left_alone(comm: mp.Communicator) -> None:
    net = Choice()
    net.w2.requires_grad = False
    with mp.DataParallel(net, comm) as replica:
        (replica(0) + replica(1)).backward()
        np.testing.assert_allclose(net.w1.grad, np.full(4, 6.0))
        assert net.w2.grad is None


def test_a_module_that_was_let_go(comm: mp.Communicator) -> None:
    net = Choice()
    replica = mp.DataParallel(net, comm)
    replica.destroy()
    net(0).backward()
    np.testing.assert_allclose(net.w1.grad, np.full(4, 6.0))
    assert net.w1.home is None


WRONG: dict[str, Callable[..., Any]] = {
    "accumulation_steps": lambda net, comm: mp.DataParallel(net, comm, accumulation_steps=0),
    "bucket_mb": lambda net, comm: mp.DataParallel(net, comm, bucket_mb=-1),
    "op": lambda net, comm: mp.DataParallel(net, comm, op="max"),
    "wire_dtype": lambda net, comm: mp.DataParallel(net, comm, wire_dtype="int8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_work(comm: mp.Communicator, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        WRONG[name](Choice(), comm)


def test_another_module_on_one_rank(world: MPI.Intracomm) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with mp.Communicator(world) as comm:
        net = Choice() if comm.rank else Net()
        with pytest.raises(MismatchError, match="registered other parameters"):
            mp.DataParallel(net, comm)
        comm.barrier()


def test_it_looks_like_its_module(comm: mp.Communicator) -> None:
    with mp.DataParallel(mp.nn.Linear(3, 2, name="only"), comm, accumulation_steps=2) as net:
        assert {"parameters", "state_dict", "zero_grad", "weight", "no_sync"} <= set(dir(net))
        assert "accumulation_steps=2" in repr(net)
        assert repr(comm) in repr(net)
        assert "\n  Linear(in_features=3, out_features=2, bias=True)\n" in repr(net)
