"""FSDP: exceptions in backward, what is set on parameters after wrapping, and wrong arguments."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.autograd import Tape
from mpipar.comm import waiting
from mpipar.errors import BufferMismatchError, ConfigError, MismatchError, StateError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD")


@pytest.fixture
def comm(world: MPI.Intracomm) -> Iterator[mp.Communicator]:
    with mp.Communicator(world, name="dp") as made:
        yield made


class Failing(mp.Function):
    """The identity, whose backward raises as long as `on`."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.copy()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if Failing.on:
            raise ArithmeticError("in backward")
        return grad


class Net(mp.nn.Module):
    """Three blocks; the backward of the second is done, that of the first is not, on failure."""

    def __init__(self, dtype: str = "float64") -> None:
        names = ("b0", "b1", "b2")
        self.blocks = [mp.nn.Linear(6, 6, seed=0, name=name, dtype=dtype) for name in names]
        self.head = mp.nn.Linear(6, 3, seed=0, name="head", dtype=dtype)

    def forward(self, x: Any) -> Any:
        x = self.blocks[0](x).tanh()
        return self.head(self.blocks[2](self.blocks[1](Failing.apply(x)).tanh()))


def full(strategy: str, **more: Any) -> mp.FsdpConfig:
    how = {"min_param_size": 0, "bucket_mb": 1e-4, **more}
    return mp.FsdpConfig(sharding_strategy=strategy, **how)


def loss_of(net: Any, rank: int, step: int = 0) -> Any:
    x = np.random.default_rng((step, rank)).standard_normal((4, 6))
    out = net(mp.Tensor(x))
    return (out * out).mean()


def reference(ranks: int, *steps: int, freeze: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return {name: gradient} of the mean over ranks, added over steps, in one process."""
    net = Net()
    for name, param in net.named_parameters():
        param.requires_grad = name not in freeze
    for step in steps:
        for rank in range(ranks):
            (loss_of(net, rank, step) * (1 / ranks)).backward()
    return {name: param.grad for name, param in net.named_parameters()}


def check(net: Any, wanted: dict[str, Any]) -> None:
    for name, shard in net.named_parameters():
        if wanted[name] is None:
            assert shard.grad is None, name
        else:
            part = shard.spec.take(wanted[name])
            np.testing.assert_allclose(shard.grad, part, atol=1e-12, err_msg=name)


def fail(loss: Any) -> None:
    Failing.on = True
    try:
        with pytest.raises(ArithmeticError, match="in backward"):
            loss.backward()
    finally:
        Failing.on = False


# -- exceptions in backward ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_after_an_exception_in_backward(comm: mp.Communicator, strategy: str) -> None:
    p, r = comm.size, comm.rank
    with mp.FSDP(Net(), comm, full(strategy)) as net:
        optimizer = mp.optim.SGD(net.parameters(), lr=0.0)
        for forget in (net.zero_grad, optimizer.zero_grad):
            forget()
            fail(loss_of(net, r))
            forget()
            loss_of(net, r, 1).backward()
            check(net, reference(p, 1))
            loss_of(net, r, 2).backward()
            check(net, reference(p, 1, 2))
            fail(loss_of(net, r, 3))  # what there was stays
            loss_of(net, r, 4).backward()
            check(net, reference(p, 1, 2, 4))
        first, second = loss_of(net, r, 1), loss_of(net, r, 2)
        net.zero_grad()
        fail(first)
        second.backward()  # without a forward between
        check(net, reference(p, 2))
        fail(loss_of(net, r))
        with net.whole_parameters(), mp.no_grad():
            loss_of(net, r)
        assert not net._reducer._flights
        assert not net._reducer.is_pending
        fail(loss_of(net, r))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_between_micro_batches(comm: mp.Communicator, strategy: str) -> None:
    p, r = comm.size, comm.rank
    with mp.FSDP(Net(), comm, full(strategy)) as net:
        with net.no_sync():
            fail(loss_of(net, r))  # nothing is lost but its own
            loss_of(net, r, 1).backward()
        loss_of(net, r, 2).backward()
        check(net, reference(p, 1, 2))
        for quiet in (True, False):
            net.zero_grad()
            with net.no_sync():
                loss_of(net, r, 1).backward()
                if quiet:
                    fail(loss_of(net, r, 2))
            if not quiet:
                fail(loss_of(net, r, 2))
            for act in (lambda: loss_of(net, r), net.sync_gradients):
                with pytest.raises(StateError, match=r"no_sync.*zero_grad"):
                    act()
            net.zero_grad()
            loss_of(net, r, 3).backward()
            check(net, reference(p, 3))


def test_an_exception_in_backward_on_one_rank(comm: mp.Communicator) -> None:
    if comm.size == 1:
        return
    with mp.FSDP(Net(), comm, full("NO_SHARD")) as net:
        loss = loss_of(net, comm.rank)
        if comm.rank == 0:
            fail(loss)
        else:
            with pytest.raises(StateError, match="another rank"):
                loss.backward()
        net.zero_grad()
        loss_of(net, comm.rank, 1).backward()
        check(net, reference(comm.size, 1))


# -- what is set after wrapping --------------------------------------------------------------------


class Rows(mp.nn.Module):
    """Units of three rows, which no two, three or four ranks but three can share out equally."""

    def __init__(self, units: int) -> None:
        self.blocks = [
            mp.nn.Linear(64, 3, bias=False, seed=0, name=f"b{n}", dtype="float64")
            for n in range(units)
        ]

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x).tanh().sum() / 10
        return (x * x).sum()


@pytest.mark.parametrize("units", [16, 32])
def test_ranks_with_shards_of_other_sizes_gather_alike(comm: mp.Communicator, units: int) -> None:
    """Whether the next unit is on its way depends on sizes, and must not on those of one rank."""
    alone = Rows(units)
    x = np.random.default_rng(0).standard_normal((4, 64))
    alone(mp.Tensor(x)).backward()
    with mp.FSDP(Rows(units), comm, full("FULL_SHARD", flatten_parameters=False)) as net:
        for _ in range(2):
            net.zero_grad()
            net(mp.Tensor(x)).backward()
        for shard, block in zip(net.parameters(), alone.blocks, strict=True):
            right = block.weight.grad.reshape(-1)[shard.spec.global_index().reshape(-1)]
            np.testing.assert_allclose(shard.grad.reshape(-1), right, rtol=1e-12)


class Skipping(Net):
    """It leaves out what `left_out` says."""

    left_out = 0

    def forward(self, x: Any) -> Any:
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = block(x).tanh()
        return self.head(x)


def test_ranks_that_leave_out_other_units_are_named(
    comm: mp.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their units have equal sizes, and as many are used: none gets another's parameters."""
    if comm.size == 1:
        return
    monkeypatch.setattr(waiting, "STUCK_SECONDS", 0.05)
    net = mp.FSDP(Skipping(), comm, full("FULL_SHARD", prefetch=False))
    net.module.left_out = min(comm.rank, 1)
    with Tape(), pytest.raises(MismatchError, match=r"rank 0: .* of unit 1 for forward"):
        loss_of(net, comm.rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_update_between_forward_and_backward(comm: mp.Communicator, strategy: str) -> None:
    """What forward has saved belongs to the values before it."""
    net = mp.FSDP(Net(), comm, full(strategy))
    optimizer = mp.optim.SGD(net.parameters(), lr=0.1)
    loss_of(net, comm.rank).backward()
    loss = loss_of(net, comm.rank, 1)
    optimizer.step()
    with pytest.raises(StateError, match="after backward"):
        loss.backward()
    net.zero_grad()
    loss_of(net, comm.rank, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requires_grad_may_be_set_later(comm: mp.Communicator, strategy: str) -> None:
    p, r = comm.size, comm.rank
    for flatten in (True, False):
        made = Net()
        made.blocks[1].weight.requires_grad = False
        with mp.FSDP(made, comm, full(strategy, flatten_parameters=flatten)) as net:
            shards = dict(net.named_parameters())
            plans: list[tuple[str, ...]] = [
                ("blocks.1.weight",),
                ("head.bias", "blocks.0.weight"),
                tuple(shards),
                ("blocks.2.bias",),
                (),
            ]
            for number, freeze in enumerate(plans):
                for name, shard in shards.items():
                    shard.requires_grad = name not in freeze
                net.zero_grad()
                loss_of(net, r, number).backward()
                if len(freeze) < len(shards):
                    check(net, reference(p, number, freeze=freeze))
                else:
                    assert all(shard.grad is None for shard in shards.values())
            net.head.weight.requires_grad = False  # the module's own will do
            net.zero_grad()
            loss = loss_of(net, r)
            assert not shards["head.weight"].requires_grad
            shards["head.weight"].requires_grad = True
            loss_of(net, r)
            with pytest.raises(StateError, match="requires_grad"):
                loss.backward()
            net.zero_grad()
            loss_of(net, r, 1).backward()
            check(net, reference(p, 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_may_be_assigned_to_shards(comm: mp.Communicator, strategy: str) -> None:
    x, alone = mp.Tensor(np.ones((2, 6))), Net()
    with mp.FSDP(Net(), comm, full(strategy)) as net, mp.no_grad():
        for step in range(3):
            for shard, param in zip(net.parameters(), alone.parameters(), strict=True):
                shard.data = shard.data * 2.0
                param.data[...] *= 2
            if step == 1:
                with pytest.raises(StateError, match="shard_parameters"):
                    net(x)
            if step != 0:
                net.shard_parameters()
            if step == 2:
                for name, value in net.full_state_dict().items():
                    np.testing.assert_array_equal(value, alone.state_dict()[name])
            np.testing.assert_allclose(net(x).data, alone(x).data, rtol=1e-12)
        shard = net.parameters()[0]
        shard.data = np.zeros((2, 3, 4))
        with pytest.raises(BufferMismatchError, match=r"blocks\.0\.weight.*\(2, 3, 4\)"):
            net.shard_parameters()
        net.blocks[1].weight.data = np.zeros((6, 6))
        with pytest.raises(StateError, match=r"blocks\.1\.weight\.data.*parameters\(\)"):
            net(x)
        np.testing.assert_allclose(net(x).data, alone(x).data, rtol=1e-12)  # it was undone


def test_a_parameter_that_is_not_gathered_has_a_name(comm: mp.Communicator) -> None:
    with mp.FSDP(Net(), comm, full("FULL_SHARD")) as net:
        if comm.size == 1:
            return
        loss_of(net, comm.rank).backward()
        block, linear = net.blocks[1], mp.nn.Linear.forward
        x = mp.Tensor(np.ones((2, 6)))
        uses: list[Callable[[], Any]] = [
            lambda: linear(block, x), lambda: x @ block.weight, lambda: block.weight * 2.0,
            lambda: block.weight.T, lambda: block.weight.sum(), lambda: block.weight[0],
            lambda: np.asarray(block.weight), lambda: block.weight.data + x.data,
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(StateError, match=r"blocks\.1\.weight.*forward of its"):
                use()
        assert repr(block.weight)


# -- arguments -------------------------------------------------------------------------------------


def test_wrong_arguments(world: MPI.Intracomm) -> None:
    with mp.Communicator(world) as comm:
        for wrap in (mp.FSDP, mp.DataParallel):
            with pytest.raises(ConfigError, match=r"Communicator of mpipar.*mesh\.dp"):
                wrap(Net(), world)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"module='int'.*nn\.Module"):
                wrap(3, comm)  # type: ignore[arg-type]
        sharded, copied = mp.FSDP(Net(), comm), mp.DataParallel(Net(), comm)
        for outer in (mp.FSDP, mp.DataParallel):
            for inner in (sharded, copied):
                names = rf"{outer.__name__}\({type(inner).__name__}"
                with pytest.raises(ConfigError, match=rf"{names}.*not nested.*\.module"):
                    outer(inner, comm)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=rf"{outer.__name__}\(FSDP.*destroy"):
                outer(sharded.module, comm)
        holder = mp.nn.Sequential(mp.nn.Linear(2, 2))
        holder.inner = copied  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"FSDP\(DataParallel"):
            mp.FSDP(holder, comm)
        sharded.destroy()
        copied.destroy()
        mp.DataParallel(sharded.module, comm).destroy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_are_computed_with_in_16_bits(world: MPI.Intracomm, dtype: str) -> None:
    class Looking(mp.nn.Module):
        def __init__(self) -> None:
            self.layer = mp.nn.Linear(6, 6, seed=0, dtype="float32")
            self.seen: list[str] = []

        def forward(self, x: Any, more: Any, ids: Any) -> Any:
            self.seen = [x.dtype.name, more["y"][0].dtype.name, ids.dtype.name]
            return self.layer(x)

    x = np.ones((2, 6))
    with (
        mp.Communicator(world) as comm,
        mp.FSDP(Looking(), comm, full("FULL_SHARD", mixed_precision=dtype)) as net,
    ):
        for given in (x, x.astype("float32"), mp.Tensor(x)):
            out = net(given, {"y": [given]}, ids=np.arange(3))
            assert net.seen == [dtype, dtype, "int64"]
            assert out.data.dtype.name == dtype
            out.sum().backward()
