"""Tensor-parallel layers whose messages travel beside their products: the same numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition, rng
from mpipar.autograd import Delay, Tape, Tensor, recompute
from mpipar.autograd.functional import gelu
from mpipar.models import ModelConfig, build
from mpipar.nn import Linear
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.inject import factories
from mpipar.parallel.mesh import Mesh
from mpipar.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpipar.parallel.tensor.sequence import SequenceShards
from mpipar.parallel.tensor.vocab import VocabParallelEmbedding
from tests.mpi.helpers import draw

DIM, HIDDEN = 12, 24
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def pair(
    comm: Communicator, cut: bool, bias: bool = True, dtype: str = "float64"
) -> tuple[Any, Any, Callable[..., Any]]:
    """Return a column and a row layer that overlap, and what cuts the sequence."""
    shards = SequenceShards(comm) if cut else None
    how: dict[str, Any] = {"overlap": True, "sequence": shards, "seed": 1, "dtype": dtype}
    up = ColumnParallelLinear(DIM, HIDDEN, comm, bias, name="up", **how)
    down = RowParallelLinear(HIDDEN, DIM, comm, bias, name="down", **how)
    return up, down, (lambda x: x) if shards is None else (lambda x: shards.shard(x, dim=-2))


def dense(bias: bool = True) -> tuple[Linear, Linear]:
    up = Linear(DIM, HIDDEN, bias, seed=1, name="up", dtype="float64")
    return up, Linear(HIDDEN, DIM, bias, seed=1, name="down", dtype="float64")


def run(up: Any, down: Any, shard: Callable[..., Any], x: np.ndarray) -> tuple[Any, Any]:
    """Return the output, and the gradient of the input, of a sum with weights."""
    leaf: Any = Tensor(x, requires_grad=True)
    out = down(gelu(up(shard(leaf))))
    (out * shard(draw(*x.shape, seed=5))).sum().backward()
    return out.data, leaf.grad


def assert_grads(local: tuple[Any, Any], whole: tuple[Any, Any]) -> None:
    for one, full in zip(local, whole, strict=True):
        for param, other in zip(one.parameters(), full.parameters(), strict=True):
            expected = param.spec.take(other.grad)
            np.testing.assert_allclose(param.grad, expected, err_msg=param.spec.name, **EXACT)


@pytest.mark.parametrize("cut", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("shape", [(10, DIM), (2, 7, DIM), (3, 3, DIM), (1, 1, DIM)])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_give_the_numbers_of_dense_ones(
    comm: Communicator, cut: bool, shape: tuple[int, ...], bias: bool
) -> None:
    """Twice, so that gradients are added up; lengths that do not divide, and below p."""
    up, down, shard = pair(comm, cut, bias)
    whole = dense(bias)
    for _ in range(2):
        expected = run(*whole, lambda x: x, draw(*shape))
        out, grad = run(up, down, shard, draw(*shape))
        np.testing.assert_allclose(out, shard(expected[0]), **EXACT)
        np.testing.assert_allclose(grad, expected[1], **EXACT)
    assert_grads((up, down), whole)


@pytest.mark.parametrize("cut", [True, False], ids=["sequence", "replicated"])
def test_weight_gradients_are_written_to_their_home(comm: Communicator, cut: bool) -> None:
    """Into the memory of a bucket, without a copy: the first block written, the others added."""
    up, down, shard = pair(comm, cut)
    whole = dense()
    run(*whole, lambda x: x, draw(2, 7, DIM))
    for layer in (up, down):
        layer.weight.register_hook(lambda param: None)
        layer.weight.home = np.full(layer.weight.shape, np.nan)
    run(up, down, shard, draw(2, 7, DIM))
    assert all(layer.weight.grad is layer.weight.home for layer in (up, down))
    assert_grads((up, down), whole)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cut", [True, False], ids=["sequence", "replicated"])
def test_gradients_that_are_put_off(comm: Communicator, cut: bool, overlap: bool) -> None:
    up, down, shard = pair(comm, cut)
    up.overlap = down.overlap = overlap
    whole = dense()
    expected = run(*whole, lambda x: x, draw(2, 7, DIM))
    with Delay([*up.parameters(), *down.parameters()]) as delay:
        _, grad = run(up, down, shard, draw(2, 7, DIM))
    np.testing.assert_allclose(grad, expected[1], **EXACT)
    assert all(param.grad is None for param in (*up.parameters(), *down.parameters()))
    delay.run()
    assert_grads((up, down), whole)


def test_weights_that_are_not_trained(comm: Communicator) -> None:
    """Backward sends the same messages, and leaves them alone."""
    for cut in (True, False):
        up, down, shard = pair(comm, cut)
        for layer in (up, down):
            layer.weight.requires_grad = False
        expected = run(*dense(), lambda x: x, draw(2, 7, DIM))
        np.testing.assert_allclose(run(up, down, shard, draw(2, 7, DIM))[1], expected[1], **EXACT)
        assert up.weight.grad is None
        assert down.bias.grad is not None


@pytest.mark.parametrize("cut", [True, False], ids=["sequence", "replicated"])
def test_recomputation(comm: Communicator, cut: bool) -> None:
    up, down, shard = pair(comm, cut)
    whole = dense()
    expected = run(*whole, lambda x: x, draw(2, 7, DIM))
    leaf: Any = Tensor(draw(2, 7, DIM), requires_grad=True)
    out = recompute(lambda x: down(gelu(up(x))), shard(leaf))
    (out * shard(draw(2, 7, DIM, seed=5))).sum().backward()
    np.testing.assert_allclose(leaf.grad, expected[1], **EXACT)
    assert_grads((up, down), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cut", [True, False], ids=["sequence", "replicated"])
def test_narrow_numbers(comm: Communicator, cut: bool, dtype: str) -> None:
    """Sums are float32 inside: as near to float64 as one rounding of each result allows."""
    up, down, shard = pair(comm, cut, dtype=dtype)
    whole = dense()
    for layer, full in zip((up, down), whole, strict=True):
        for param, other in zip(layer.parameters(), full.parameters(), strict=True):
            sizes = partition.blocks(other.shape[0], comm.size)
            if param.shape == other.shape:
                other.data[...] = param.data
            elif param.shape[0] != other.shape[0]:
                other.data[...] = comm.all_gather(param.data, dim=0, sizes=sizes)
            else:
                other.data[...] = comm.all_gather(param.data, dim=1)
    x = draw(2, 7, DIM).astype(up.weight.dtype)
    out, grad = run(up, down, shard, x)
    expected = run(*whole, lambda x: x, x.astype(np.float64))
    assert out.dtype == grad.dtype == up.weight.grad.dtype == down.bias.grad.dtype == x.dtype
    bound = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.01}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), shard(expected[0]), rtol=bound, atol=bound)
    np.testing.assert_allclose(grad.astype(np.float64), expected[1], rtol=bound, atol=2 * bound)
    for layer, full in zip((up, down), whole, strict=True):
        for param, other in zip(layer.parameters(), full.parameters(), strict=True):
            np.testing.assert_allclose(
                np.asarray(param.grad, np.float64),
                param.spec.take(other.grad),
                rtol=bound,
                atol=4 * bound,
            )


def test_messages(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cut sequence p - 1 neighbour messages for each collective; else the collectives."""
    sent: list[tuple[int, ...]] = []
    real = comm.sendrecv

    def counted(x: np.ndarray, **how: Any) -> Any:
        sent.append(x.shape)
        return real(x, **how)

    monkeypatch.setattr(comm, "sendrecv", counted)
    steps, many = comm.size - 1, int(comm.size > 1)
    up, down, shard = pair(comm, cut=True)
    out = down(gelu(up(shard(Tensor(draw(2, 8, DIM))))))
    assert len(sent) == 2 * steps
    assert sum(np.prod(shape) for shape in sent) <= 2 * steps * 2 * -(-8 // comm.size) * DIM
    out.sum().backward()
    assert len(sent) == 2 * steps + 3 * steps  # the input of `up` is gathered again
    assert comm.calls == ({"all_gather": 1} if many else {})  # of the gradient of `shard`
    comm.calls.clear()
    up, down, _ = pair(comm, cut=False)
    out = down(gelu(up(Tensor(draw(2, 8, DIM)))))
    assert comm.calls == ({"all_reduce": 4} if many else {})  # the pieces
    out.sum().backward()
    assert comm.calls == ({"all_reduce": 5} if many else {})


def test_a_reproducible_communicator_adds_in_rank_order(raw: MPI.Intracomm) -> None:
    """The sums are the same bits with overlap and without."""
    with Communicator(raw, reproducible=True) as comm, Tape():
        outs = []
        for overlap in (True, False):
            _, down, _ = pair(comm, cut=True)
            down.overlap = overlap
            x = draw(2, 7, HIDDEN)[..., partition.block(HIDDEN, comm.size, comm.rank)]
            outs.append(down(Tensor(np.ascontiguousarray(x))).data)
        assert (outs[0] == outs[1]).all()


def test_logits_overlap(comm: Communicator) -> None:
    x, ids = draw(2, 7, 6), np.arange(14).reshape(2, 7) % 10
    for shards in (SequenceShards(comm), None):
        table = VocabParallelEmbedding(
            10, 6, comm, sequence=shards, overlap=True, name="t", dtype="float64"
        )
        full = comm.all_gather(table.weight.data, dim=0, sizes=partition.blocks(10, comm.size))
        leaf: Any = Tensor(x, requires_grad=True)
        part = leaf if shards is None else shards.shard(leaf, dim=1)
        logits = table.logits(table(ids) + part)
        columns = partition.block(10, comm.size, comm.rank)
        np.testing.assert_allclose(logits.data, ((x + full[ids]) @ full.T)[..., columns], **EXACT)
        logits.sum().backward()
        np.testing.assert_allclose(leaf.grad, np.broadcast_to(full.sum(0), x.shape), **EXACT)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_models(raw: MPI.Intracomm, model: str) -> None:
    """Loss and every gradient slice, with a cut sequence and without, whatever its length."""
    made = ModelConfig(
        model, vocab=11, layers=2, dim=48, heads=12, seq=10, hidden=60, dropout=0.1, dtype="float64"
    )
    draws = np.random.default_rng(1)
    for seq in (10, 3):
        tokens, targets = draws.integers(0, 11, (2, 2, seq))
        whole = build(made)
        with rng.at(1, 0):
            expected, _ = whole.loss(tokens, targets)
        expected.backward()
        with Mesh(raw, tp=raw.size) as mesh, Tape():
            for cut in (True, False):
                local = build(made, **factories(mesh, sequence_parallel=cut, overlap=True))
                with rng.at(1, 0):
                    got, _ = local.loss(tokens, targets)
                got.backward()
                np.testing.assert_allclose(got.item(), expected.item(), rtol=1e-12)
                for param, full in zip(local.parameters(), whole.parameters(), strict=True):
                    grad: Any = param.grad
                    np.testing.assert_allclose(grad, param.spec.take(full.grad), **EXACT)
