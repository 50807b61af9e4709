"""Gradient buckets in memory that the ranks of a node share: results lie once, and can be read."""

import logging
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.comm import shared_memory, window_memory, window_reduction
from mpipar.errors import ConfigError

STEPS = ["ready", "add", "across", "reduced", "done", "forward", "read"]
TINY = 2**-12  # of a bucket, in 2^20 bytes: 64 numbers


class Net(mp.nn.Module):
    """Weights of several sizes; `odd` is used when asked for."""

    def __init__(self) -> None:
        self.up = mp.nn.Linear(8, 24, seed=1, name="up", dtype="float64")
        self.down = mp.nn.Linear(24, 8, seed=2, name="down", dtype="float64")
        self.scale = mp.nn.Parameter(np.array(0.5))
        self.odd = mp.nn.Parameter(np.ones(3))

    def forward(self, x: Any, odd: bool = True) -> Any:
        y = self.down(self.up(x).tanh()) * self.scale
        loss = (y * y).sum()
        return loss + (self.odd * x.sum().item()).sum() if odd else loss


def batch(rank: int, step: int) -> Any:
    return mp.Tensor(np.random.default_rng((rank, step)).standard_normal((4, 8)))


def alone(net: Net, ranks: int, step: int, odd: bool = True) -> list[np.ndarray]:
    """Return the mean over ranks of the gradients of `net` at its weights."""
    params = net.parameters()
    for param in params:
        param.grad = None
    for rank in range(ranks):
        (net(batch(rank, step), odd or rank > 0) * (1.0 / ranks)).backward()
    return [param.grad for param in params]


def same(net: Any, expected: list[np.ndarray]) -> None:
    for param, right in zip(net.parameters(), expected, strict=True):
        np.testing.assert_allclose(param.grad, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", ["", "0,0,1,1"], ids=["one", "two"])
@pytest.mark.parametrize("step", STEPS)
def test_a_slow_rank_at_every_step(
    raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, step: str, layout: str
) -> None:
    """One rank after the other is late; the others run ahead, to the next backward and on."""
    late = 0

    def pause(at: str, number: int) -> None:
        if at == step and late % raw.size == raw.rank:
            time.sleep(0.003)

    monkeypatch.setattr(window_reduction, "pause", pause)
    if layout:
        monkeypatch.setenv("MPIPAR_FAKE_NODES", layout)
    reference = Net()
    with mp.Communicator(raw) as comm:
        net = mp.DataParallel(Net(), comm, bucket_mb=TINY, shared=True)
        optimizers = [mp.optim.AdamW(n.parameters(), lr=0.01) for n in (net, reference)]
        for late in range(2 * raw.size + 1):
            pause("forward", 0)
            net.zero_grad()
            net(batch(comm.rank, late)).backward()
            expected = alone(reference, comm.size, late)
            pause("read", 0)
            same(net, expected)
            for optimizer in optimizers:
                optimizer.step()
            for ours, right in zip(net.parameters(), reference.parameters(), strict=True):
                np.testing.assert_allclose(ours.data, right.data, rtol=1e-9, atol=1e-12)
        net.destroy()


def test_late_at_random_and_no_gradient_is_cleared(
    raw: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is added to elsewhere: the results stay as they are."""
    draws = np.random.default_rng(raw.rank)

    def pause(at: str, number: int) -> None:
        if draws.random() < 0.1:
            time.sleep(draws.random() * 0.003)

    monkeypatch.setattr(window_reduction, "pause", pause)
    reference = Net()
    with mp.Communicator(raw) as comm, mp.DataParallel(Net(), comm, bucket_mb=TINY) as net:
        total = [np.zeros(param.data.shape) for param in net.parameters()]
        for step in range(12):
            before = [param.grad for param in net.parameters()]
            assert step != 1 or comm.size == 1 or not before[0].flags.writeable
            kept = [None if grad is None else grad.copy() for grad in before]
            with net.no_sync():
                net(batch(comm.rank, 2 * step)).backward()
            for old, copy in zip(before, kept, strict=True):
                assert copy is None or comm.size == 1 or (old == copy).all()
            net(batch(comm.rank, 2 * step + 1)).backward()
            for number in (2 * step, 2 * step + 1):
                new = alone(reference, comm.size, number)
                total = [t + g for t, g in zip(total, new, strict=True)]
            same(net, total)


def test_results_cannot_be_written_and_lie_once(comm: mp.Communicator) -> None:
    with mp.DataParallel(Net(), comm, shared=True) as net:
        for step in range(3):
            net.zero_grad()
            net(batch(comm.rank, step)).backward()
            if comm.size == 1:
                continue
            for param in net.parameters():
                assert not param.grad.flags.writeable
                assert param.home.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                net.up.weight.grad *= 2
            memory = net._synchronizer._slots.memory
            local = comm.process_group.raw
            where = net.up.weight.grad
            local.Barrier()
            if comm.rank == 0:  # what the first rank writes there, all ranks read
                memory._memory.vectors[0][0].view(np.float64)[:] = 7.0
                memory._memory.segment.sync()
            local.Barrier()
            memory._memory.segment.sync()
            assert (where == 7.0).all()
            local.Barrier()


def test_clipping(comm: mp.Communicator) -> None:
    reference = Net()
    with mp.DataParallel(Net(), comm) as net:
        for make in (
            lambda ps: mp.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
            lambda ps: mp.optim.Adam(ps, lr=0.1, weight_decay=0.1),
            lambda ps: mp.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda ps: mp.optim.SGD(ps, lr=0.1),
        ):
            ours, right = make(net.parameters()), make(reference.parameters())
            for step in range(2):
                ours.zero_grad()
                net(batch(comm.rank, step)).backward()
                alone(reference, comm.size, step)
                norm = mp.clip_grad_norm(reference.parameters(), 0.5)
                how = 0.5 if step else None  # by copies, or in the optimiser's pass
                assert mp.clip_grad_norm(net.parameters(), how) == pytest.approx(norm, rel=1e-12)
                ours.step(grad_scale=1.0 if step else mp.clip_factor(norm, 0.5))
                right.step()
                for a, b in zip(net.parameters(), reference.parameters(), strict=True):
                    np.testing.assert_allclose(a.data, b.data, rtol=1e-9, atol=1e-12)


def test_used_on_some_ranks_only(comm: mp.Communicator) -> None:
    reference = Net()
    with mp.DataParallel(Net(), comm, bucket_mb=TINY) as net:
        for step in range(4):
            net.zero_grad()
            net(batch(comm.rank, step), odd=comm.rank > 0).backward()
            expected = alone(reference, comm.size, step, odd=False)
            if comm.size == 1:
                expected[-1] = None
                assert net.odd.grad is None
            else:
                same(net, expected)


def test_gradients_outlive_the_memory(comm: mp.Communicator) -> None:
    net = mp.DataParallel(Net(), comm)
    net(batch(comm.rank, 1)).backward()
    net.zero_grad()
    net(batch(comm.rank, 0)).backward()
    kept = [param.grad.copy() for param in net.parameters()]
    with net.no_sync():  # lies in the buckets, and is this rank's own
        net.scale.grad = None
        net(batch(comm.rank, 0)).backward()
    own = net.scale.grad.copy()
    net.destroy()
    assert net.scale.grad == own
    assert all(param.grad.flags.writeable for param in net.parameters())
    assert len(kept) == len(net.parameters())


def test_parameters_that_come_later(comm: mp.Communicator) -> None:
    """Sharing is collective, so the first step with new parameters uses messages."""
    first = [mp.nn.Parameter(np.zeros(50)), mp.nn.Parameter(np.zeros((3, 4)))]
    later = [mp.nn.Parameter(np.zeros(70, np.float32)), mp.nn.Parameter(np.zeros(0))]
    with mp.GradientSynchronizer(comm, TINY, op="sum") as synchronizer:
        for params in (first, first + later):
            synchronizer.register(params)
            for step in range(3):
                for param in params[:: 1 if comm.rank else -1]:
                    synchronizer.submit(param, np.full(param.shape, comm.rank + step, param.dtype))
                synchronizer.sync()
                total = sum(range(comm.size)) + step * comm.size
                assert all((param.grad == total).all() for param in params)
                assert params[0].grad.flags.writeable == (step == 0 or comm.size == 1)


def test_very_many_buckets_at_once(world: MPI.Intracomm) -> None:
    """Nothing recurses over the buckets that are under way."""
    params = [mp.nn.Parameter(np.zeros(2)) for _ in range(600)]
    with mp.Communicator(world) as comm, mp.GradientSynchronizer(comm, 1e-9) as synchronizer:
        synchronizer.register(params)
        for step in range(2):
            for i, param in enumerate(params):
                synchronizer.submit(param, np.full(2, float(i + step)))
            synchronizer.sync()
            assert all((param.grad == i + step).all() for i, param in enumerate(params))


@pytest.mark.parametrize("why", ["full", "switched off"])
def test_no_room_is_said_once(
    raw: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    if raw.size == 1:
        return
    if why == "full":
        monkeypatch.setattr(shared_memory, "free_bytes", lambda: 100)
    elif raw.rank == 0:
        monkeypatch.setenv("MPIPAR_WINDOWS", "0")
    monkeypatch.setattr(window_memory, "_said", set())
    with caplog.at_level(logging.WARNING, "mpipar"), mp.Communicator(raw) as comm:
        for _ in range(2):
            with mp.DataParallel(Net(), comm) as net:
                net(batch(comm.rank, 0)).backward()
                same(net, alone(Net(), comm.size, 0))
                assert net.scale.grad.flags.writeable
        with pytest.raises(ConfigError, match="shared=True"):
            mp.DataParallel(Net(), comm, shared=True)
    said = [record for record in caplog.records if "gradient buckets use" in record.message]
    assert len(said) == (1 if raw.rank == 0 else 0)


def test_settings_that_cannot_work(comm: mp.Communicator) -> None:
    with pytest.raises(ConfigError, match="wire_dtype"):
        mp.DataParallel(Net(), comm, wire_dtype="float16", shared=True)
    with pytest.raises(ConfigError, match="shared='yes'"):
        mp.GradientSynchronizer(comm, shared="yes")  # type: ignore[arg-type]


def test_a_rank_that_never_submits_is_named(world: MPI.Intracomm) -> None:
    if world.size == 1:
        return
    with mp.Communicator(world, timeout=1.1) as comm:
        params = [mp.nn.Parameter(np.zeros(4))]
        synchronizer = mp.GradientSynchronizer(comm)
        synchronizer.register(params)
        synchronizer.start()
        if comm.rank == 0:
            synchronizer.submit(params[0], np.ones(4))
            with pytest.raises(TimeoutError, match=r"window.*of this node to start it"):
                synchronizer.sync()
        world.Barrier()
