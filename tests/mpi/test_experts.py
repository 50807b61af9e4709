"""Mixtures of experts against dense float64 ones in which every expert computes every token."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition
from mpipar.autograd import Tape, Tensor, no_grad, recompute
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError, MismatchError
from mpipar.models import ModelConfig, build
from mpipar.parallel.clip import clip_grad_norm
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.data_parallel import DataParallel
from mpipar.parallel.experts.moe import MoE, balance_loss, expert_parameters
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh

DIM, HIDDEN = 6, 10
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with Communicator(MPI.COMM_SELF) as made:
        yield made


def tokens(n: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, DIM))


def make(comm: Communicator, experts: int, k: int, **settings: Any) -> MoE:
    settings = {"seed": 1, "name": "moe", "std": 0.7, "dtype": "float64", **settings}
    return MoE(DIM, HIDDEN, experts, k, comm, **settings)


def dense(moe: MoE, x: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """Output and balance loss, every expert on every token, with the weights of a whole layer."""
    scores = F.softmax(F.linear(x, moe.router))
    ranked = np.argsort(-scores.data, axis=1, kind="stable")[:, : moe.k]
    chosen = np.zeros(scores.shape)
    np.put_along_axis(chosen, ranked, 1.0, 1)
    weights = scores * chosen
    if moe.normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    if capacity is not None:
        weights = weights * (np.cumsum(chosen, axis=0) <= capacity)
    y = x * 0.0
    for expert in range(moe.experts):
        inner = F.linear(x, moe.up[expert])
        if moe.activation == "gelu":
            inner = F.gelu(inner)
        else:
            inner = F.swiglu(*F.split(inner, inner.shape[-1] // 2, dim=-1))
        y = y + F.linear(inner, moe.down[expert]) * weights[:, expert : expert + 1]
    shares = chosen.sum(0) / chosen.sum()
    return y, (scores.mean(0) * shares).sum() * moe.experts


def compare(
    comm: Communicator, alone: Communicator, moe: MoE, sizes: tuple[int, ...], **settings: Any
) -> None:
    """Compare a layer over `comm`, with so many tokens a rank, to the dense one."""
    capacity = settings.pop("limit", None)
    whole = make(alone, moe.experts, moe.k, **settings)
    everyone, grad = tokens(sum(sizes)), tokens(sum(sizes), 5)
    x = Tensor(everyone, requires_grad=True)
    with Tape():
        y, balance = dense(whole, x, capacity)
        ((y * grad).sum() + balance * 0.3).backward()
    start = sum(sizes[: comm.rank])
    cut = slice(start, start + sizes[comm.rank])
    mine = Tensor(everyone[cut].copy(), requires_grad=True)
    out = moe(mine)
    np.testing.assert_allclose(out.data, y.data[cut], **EXACT)
    np.testing.assert_allclose(balance_loss(moe).item(), balance.item(), **EXACT)
    ((out * grad[cut]).sum() + balance_loss(moe) * 0.3).backward()
    np.testing.assert_allclose(mine.grad, x.grad[cut], **EXACT)
    router = comm.all_reduce(moe.router.grad)  # a term of a sum over the ranks
    np.testing.assert_allclose(router, whole.router.grad, **EXACT)
    for own, full in ((moe.up, whole.up), (moe.down, whole.down)):
        np.testing.assert_array_equal(own.data, own.spec.take(full.data))
        np.testing.assert_allclose(own.grad, own.spec.take(full.grad), **EXACT)


def uneven(p: int) -> tuple[int, ...]:
    """Token counts of p ranks: 7, 0, 9, 10, ...: none on the second."""
    return tuple(0 if rank == 1 else 7 + rank for rank in range(p))


# ---- numbers


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_all_tokens_are_served(comm: Communicator, alone: Communicator, activation: str) -> None:
    for experts, k in ((4, 2), (5, 1), (3, 3), (2, 1), (1, 1)):
        moe = make(comm, experts, k, activation=activation)
        compare(comm, alone, moe, uneven(comm.size), activation=activation)
        assert moe.dropped == 0
        assert moe.load.sum() == k * sum(uneven(comm.size))


@pytest.mark.parametrize("k", [1, 2])
def test_capacity_takes_the_first_in_global_order(
    comm: Communicator, alone: Communicator, k: int
) -> None:
    for capacity in (1, 3, 100):
        moe = make(comm, 4, k, capacity=capacity)
        compare(comm, alone, moe, uneven(comm.size), limit=capacity)
        assert (moe.dropped > 0) == (capacity < moe.load.max())


def test_capacity_by_index_is_the_same_in_any_layout(
    comm: Communicator, alone: Communicator
) -> None:
    n, capacity = 23, 4
    everyone, whole = tokens(n), make(alone, 4, 2, capacity=capacity)
    with no_grad():
        expected, _ = dense(whole, Tensor(everyone), capacity)
        for seed in range(3):
            mixed = np.random.default_rng(seed).permutation(n)
            index = mixed[partition.block(n, comm.size, comm.rank)]
            out = make(comm, 4, 2, capacity=capacity)(Tensor(everyone[index]), index)
            np.testing.assert_allclose(out.data, expected.data[index], **EXACT)


def test_capacity_factor(comm: Communicator) -> None:
    moe = make(comm, 4, 2, capacity_factor=1.25)
    with no_grad():
        moe(Tensor(tokens(8, comm.rank)))
    capacity = -(-1.25 * 2 * 8 * comm.size // 4)
    assert moe.dropped == np.maximum(moe.load - capacity, 0).sum()


def test_one_expert_gets_all_and_others_none(comm: Communicator, alone: Communicator) -> None:
    def tilt(moe: MoE) -> MoE:
        moe.router.data[...] = 0  # ties: the first experts are taken
        return moe

    everyone = tokens(6 * comm.size)
    moe, whole = tilt(make(comm, 4, 1)), tilt(make(alone, 4, 1))
    x = Tensor(everyone, requires_grad=True)
    with Tape():
        y, _ = dense(whole, x)
        y.sum().backward()
    cut = partition.block(len(everyone), comm.size, comm.rank)
    out = moe(Tensor(everyone[cut].copy(), requires_grad=True))
    out.sum().backward()
    assert moe.load.tolist() == [len(everyone), 0, 0, 0]
    np.testing.assert_allclose(out.data, y.data[cut], **EXACT)
    np.testing.assert_allclose(moe.up.grad, moe.up.spec.take(whole.up.grad), **EXACT)


def test_shape_and_16_bit(comm: Communicator) -> None:
    x = tokens(12, comm.rank).reshape(2, 6, DIM)
    exact = make(comm, 4, 2)(Tensor(x))
    assert exact.shape == x.shape
    short = make(comm, 4, 2, dtype="bfloat16")
    x16 = Tensor(x.astype(short.router.dtype), requires_grad=True)
    out = short(x16)
    assert out.dtype == short.router.dtype
    out.sum().backward()
    assert np.isfinite(x16.grad.astype(float)).all()
    far = np.abs(out.data.astype(float) - exact.data).max(-1) > 0.5
    assert far.mean() < 0.35  # but for tokens whose experts are nearly tied


def test_recomputed_in_backward(comm: Communicator) -> None:
    grads = []
    for run in (lambda f, x: f(x), recompute):
        moe, x = make(comm, 4, 2), Tensor(tokens(5, comm.rank), requires_grad=True)
        run(moe, x).sum().backward()
        grads.append((x.grad, moe.up.grad))
    for one, other in zip(*grads, strict=True):
        np.testing.assert_allclose(one, other, **EXACT)


def test_messages(comm: Communicator) -> None:
    several = int(comm.size > 1)
    moe = make(comm, 4, 2)
    x = Tensor(tokens(5), requires_grad=True)
    out = moe(x)
    assert dict(comm.calls) == (  # the first time, one all_gather tells the settings
        {"all_gather": 2, "all_to_all": 2, "all_reduce": 1} if several else {}
    )
    out.sum().backward()
    assert comm.calls["all_to_all"] == 4 * several
    moe(x)
    assert comm.calls["all_gather"] == 3 * several


# ---- with a mesh


@pytest.mark.parametrize("tp", [1, 2])
def test_with_data_and_tensor_parallel(world: MPI.Intracomm, alone: Communicator, tp: int) -> None:
    if world.size % tp:
        pytest.skip("tp does not divide the ranks")
    plane = world.size // tp
    for ep in [d for d in range(1, plane + 1) if plane % d == 0]:
        with Mesh(world, tp=tp, ep=ep) as mesh, Tape():
            data = mesh.group("dp", "cp")
            settings: dict[str, Any] = {"capacity": 5, "shared": 4, "activation": "swiglu"}
            moe = make(mesh.ep, 4, 2, over=data, tp=mesh.tp, **settings)
            whole = make(alone, 4, 2, **settings)
            everyone, grad = tokens(11), tokens(11, 5)
            x = Tensor(everyone, requires_grad=True)
            with Tape():
                y = whole(x)
                ((y * grad).sum() + whole.balance_loss).backward()
            cut = partition.block(11, data.size, data.rank)
            out = moe(Tensor(everyone[cut].copy(), requires_grad=True))
            np.testing.assert_allclose(out.data, y.data[cut], **EXACT)
            ((out * grad[cut]).sum() + moe.balance_loss).backward()
            assert moe.dropped == whole.dropped > 0
            spread = {id(param) for param in expert_parameters(moe)}
            for (name, own), full in zip(moe.named_parameters(), whole.parameters(), strict=True):
                where = mesh.group("edp") if id(own) in spread else data
                own.grad = where.all_reduce(own.grad)
                expected = own.spec.take(full.grad)
                np.testing.assert_allclose(own.grad, expected, **EXACT, err_msg=name)
            norm = clip_grad_norm(moe.parameters(), None, mesh)
            np.testing.assert_allclose(norm, clip_grad_norm(whole.parameters(), None), rtol=1e-12)


def test_data_parallel_leaves_spread_experts_alone(
    world: MPI.Intracomm, alone: Communicator
) -> None:
    everyone = tokens(3 * world.size)
    whole = make(alone, 4, 2)
    with Tape():
        (whole(Tensor(everyone)).sum() + whole.balance_loss).backward()
    for ep in {1, world.size, 2 - world.size % 2}:
        with Mesh(world, ep=ep) as mesh, Tape():
            moe = make(mesh.ep, 4, 2, over=mesh.dp)
            with DataParallel(moe, mesh.dp, op="sum") as replica:
                y = replica(Tensor(everyone[3 * mesh.dp.rank :][:3]))
                (y.sum() + moe.balance_loss).backward()
                spread = expert_parameters(moe)
                assert len(spread) == (2 if ep > 1 else 0)
                sum_gradients(spread, mesh.group("edp"))
                for own, full in zip(moe.parameters(), whole.parameters(), strict=True):
                    np.testing.assert_array_equal(own.data, own.spec.take(full.data))
                    np.testing.assert_allclose(own.grad, own.spec.take(full.grad), **EXACT)


def test_a_model_with_experts(world: MPI.Intracomm, alone: Communicator) -> None:
    """A step of a whole model, the MLP of each block a mixture: as on one rank with all tokens."""
    config = ModelConfig(
        model="llama", vocab=19, layers=2, dim=DIM, heads=1, seq=5, seed=3, dtype="float64"
    )
    batch, targets = np.random.default_rng(4).integers(0, 19, (2, 2 * world.size + 1, 5))

    def loss_of(model: Any, over: Communicator, group: Communicator) -> Any:
        for number, block in enumerate(model.blocks):
            name = f"blocks.{number}.mlp"
            block.mlp = make(group, 4, 2, over=over, name=name, capacity_factor=0.8)
        rows = partition.block(len(batch), over.size, over.rank)
        mean = token_mean(*model.loss(batch[rows], targets[rows]), over)
        return mean + balance_loss(model) * 0.01

    whole = build(config)
    with Tape():
        expected = loss_of(whole, alone, alone)
        expected.backward()
    for ep in {world.size, 2 - world.size % 2}:
        with Mesh(world, ep=ep) as mesh, Tape():
            model = build(config)
            loss = loss_of(model, mesh.dp, mesh.ep)
            loss.backward()
            np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-11)
            assert model.blocks[0].mlp.dropped == whole.blocks[0].mlp.dropped > 0
            spread = expert_parameters(model)
            kept = {id(param) for param in spread}
            sum_gradients(spread, mesh.group("edp"))
            sum_gradients([p for p in model.parameters() if id(p) not in kept], mesh.dp)
            for own, full in zip(model.parameters(), whole.parameters(), strict=True):
                expected_grad = own.spec.take(full.grad)
                np.testing.assert_allclose(own.grad, expected_grad, **EXACT, err_msg=own.spec.name)


# ---- bad input


def test_bad_settings_and_input(comm: Communicator, alone: Communicator) -> None:
    for text, settings in (
        ("k=5", {"k": 5}),
        ("k=0", {"k": 0}),
        ("capacity=0", {"capacity": 0}),
        ("capacity_factor", {"capacity": 2, "capacity_factor": 1.0}),
        ("activation='relu'", {"activation": "relu"}),
    ):
        with pytest.raises(ConfigError, match=text):
            make(comm, 4, **{"k": 2, **settings})
    wrong: Any = MPI.COMM_WORLD
    with pytest.raises(ConfigError, match=r"comm='Intracomm'.*Pass mesh\.ep"):
        make(wrong, 4, 2)
    for called in ("over", "tp"):
        with pytest.raises(ConfigError, match=f"{called}='Intracomm'"):
            make(comm, 4, 2, **{called: wrong})
    if comm.size > 1:
        with pytest.raises(ConfigError, match=r"over\.ranks"):
            make(comm, 4, 2, over=alone)
    moe = make(comm, 4, 2)
    last = comm.rank == comm.size - 1
    with pytest.raises(BufferMismatchError, match="shape, dtype"):
        moe(Tensor(np.ones((3, DIM + last))))
    with pytest.raises(BufferMismatchError, match="index"):
        moe(Tensor(np.ones((3, DIM))), np.arange(3 + last))
    if comm.size > 1:
        with pytest.raises(MismatchError, match="index"):
            moe(Tensor(np.ones((3, DIM))), np.arange(3) if last else None)
        with pytest.raises(MismatchError, match=f"rank {comm.size - 1}: training=False"):
            moe.train(not last)(Tensor(np.ones((3, DIM))))
        moe.train()
    assert comm.calls["all_to_all"] == 0
    moe(Tensor(np.ones((3, DIM))))  # the communicator goes on


def test_layers_made_with_different_settings(comm: Communicator) -> None:
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1
    for name, usual, other in (
        ("k", 2, 1),
        ("experts", 4, 6),
        ("capacity", None, 3),
        ("capacity_factor", None, 1.25),
        ("activation", "gelu", "swiglu"),
        ("normalise", True, False),
        ("shared", 0, 5),
        ("dtype", "float64", "float32"),
    ):
        given = {"experts": 4, "k": 2, "normalise": True, name: other if last else usual}
        moe = make(comm, **given)
        for _ in range(2):  # it is not taken for agreed on after an error
            with pytest.raises(MismatchError) as caught:
                moe(Tensor(tokens(3).astype(given.get("dtype", "float64"))))
            assert f"rank {comm.size - 1}: {name}={other}" in str(caught.value)
            assert f"{name}={usual};" in str(caught.value)
    moe = MoE(DIM, HIDDEN + last, 4, 2, comm, name="moe", dtype="float64")
    with pytest.raises(MismatchError, match=f"hidden={HIDDEN}; .*hidden={HIDDEN + 1}"):
        moe(Tensor(tokens(3)))
