"""Embedding and cross-entropy over a spread vocabulary, against the whole one and plain NumPy."""

from typing import Any

import numpy as np
import pytest

from mpipar import arrays, partition
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError
from mpipar.nn import Embedding
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.tensor.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tests.mpi.helpers import draw

VOCABS = (1, 3, 8, 10, 257)  # fewer than ranks, even, uneven
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
IGNORED = -100


def some_ids(vocab: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, vocab, shape)


def columns(comm: Communicator, vocab: int) -> slice:
    return partition.block(vocab, comm.size, comm.rank)


def plain(z: np.ndarray, targets: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss of each row and its gradient, as PyTorch defines them."""
    vocab = z.shape[1]
    e = np.exp(z - z.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    wanted = np.full(z.shape, smoothing / vocab)
    valid = targets != IGNORED
    wanted[np.flatnonzero(valid), targets[valid]] += 1 - smoothing
    loss = -(wanted * np.log(p)).sum(axis=1) * valid
    return loss, (p - wanted) * valid[:, None]


# ---- embedding


@pytest.mark.parametrize("vocab", VOCABS)
def test_embedding_is_the_dense_one(comm: Communicator, vocab: int) -> None:
    whole = Embedding(vocab, 6, seed=1, name="table", dtype="float64")
    local = VocabParallelEmbedding(vocab, 6, comm, seed=1, name="table", dtype="float64")
    assert (local.weight.data == whole.weight.data[columns(comm, vocab)]).all()
    ids, y, z = some_ids(vocab, 2, 9), draw(2, 9, 6), draw(2, 9, vocab, seed=4)
    rows = whole(ids)
    ((rows * y).sum() + (whole.logits(rows) * z).sum()).backward()  # a tied table: two uses
    mine = local(ids)
    np.testing.assert_array_equal(mine.data, rows.data)
    logits = local.logits(mine)
    assert logits.shape == (2, 9, partition.blocks(vocab, comm.size)[comm.rank])
    # replicated terms of the loss count once, terms of a rank's own columns are added over ranks
    rest = (logits * z[..., columns(comm, vocab)]).sum()
    ((mine * y).sum() + rest).backward()
    np.testing.assert_allclose(
        local.weight.grad, local.weight.spec.take(whole.weight.grad), **EXACT
    )


def test_embedding_from_full(comm: Communicator) -> None:
    table = draw(10, 4).astype(np.float32)
    local = VocabParallelEmbedding.from_full(table, comm, name="table")
    assert local.weight.dtype == np.float32
    assert not np.shares_memory(local.weight.data, table)
    ids = some_ids(10, 2, 9)
    np.testing.assert_array_equal(local(ids).data, table[ids])


def test_messages_of_the_embedding(comm: Communicator) -> None:
    local, once = VocabParallelEmbedding(10, 4, comm), int(comm.size > 1)
    rows = local(some_ids(10, 3))
    assert comm.calls.total() == once
    logits = local.logits(rows)
    assert comm.calls.total() == once
    logits.sum().backward()
    assert comm.calls.total() == comm.calls["all_reduce"] == 2 * once


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_vocabulary_is_an_error_on_all_ranks(
    comm: Communicator, bad: int
) -> None:
    local = VocabParallelEmbedding(10, 4, comm)
    with pytest.raises(ConfigError, match=f"={bad}:.*10"):
        local(np.array([[1, 2], [bad, 3]]))
    assert comm.calls.total() == 0


# ---- cross-entropy


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss_and_gradient_without_reduction(
    comm: Communicator, vocab: int, smoothing: float
) -> None:
    z, weights = 5 * draw(7, vocab), draw(7, seed=8)
    targets = some_ids(vocab, 7)
    targets[2] = IGNORED
    expected, gradient = plain(z, targets, smoothing)
    local = Tensor(z[:, columns(comm, vocab)].copy(), requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        local, targets, comm, label_smoothing=smoothing, reduction="none"
    )
    np.testing.assert_allclose(loss.data, expected, **EXACT)
    (loss * weights).sum().backward()
    expected_grad = (gradient * weights[:, None])[:, columns(comm, vocab)]
    np.testing.assert_allclose(local.grad, expected_grad, **EXACT)
    assert not local.grad[2].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reductions_agree_with_the_dense_loss(
    comm: Communicator, reduction: str, smoothing: float
) -> None:
    vocab = 257
    z, targets = draw(2, 5, vocab), some_ids(vocab, 2, 5)
    targets[:, 3] = 7
    settings: dict[str, Any] = {
        "label_smoothing": smoothing,
        "reduction": reduction,
        "ignore_index": 7,
    }
    whole = Tensor(z, requires_grad=True)
    expected = F.cross_entropy(whole, targets, **settings)
    expected.backward()
    local = Tensor(z[..., columns(comm, vocab)].copy(), requires_grad=True)
    loss = vocab_parallel_cross_entropy(local, targets, comm, **settings)
    assert loss.shape == ()
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-12)
    np.testing.assert_allclose(local.grad, whole.grad[..., columns(comm, vocab)], **EXACT)


def test_the_loss_is_replicated_to_the_bit(comm: Communicator) -> None:
    z = draw(6, 10)[:, columns(comm, 10)]
    loss = vocab_parallel_cross_entropy(Tensor(z), some_ids(10, 6), comm, reduction="none").data
    assert (comm.all_reduce(loss, op="min") == comm.all_reduce(loss, op="max")).all()


def test_huge_logits(comm: Communicator) -> None:
    z = 1e4 * np.sign(draw(4, 12))
    expected, gradient = plain_of_huge(z, np.array([0, 1, 2, 3]))
    local = Tensor(z[:, columns(comm, 12)].copy(), requires_grad=True)
    loss = vocab_parallel_cross_entropy(local, np.array([0, 1, 2, 3]), comm, reduction="none")
    loss.sum().backward()
    np.testing.assert_allclose(loss.data, expected, rtol=1e-12)
    np.testing.assert_allclose(local.grad, gradient[:, columns(comm, 12)], **EXACT)


def plain_of_huge(z: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shifted = z - z.max(axis=1, keepdims=True)
    lse = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    gradient = np.exp(shifted - lse)
    gradient[np.arange(len(z)), targets] -= 1
    return (lse - shifted)[np.arange(len(z)), targets], gradient


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("float32", 2.0**-22)]
)
def test_short_floats_are_computed_in_float32(
    comm: Communicator, dtype: str, rounding: float
) -> None:
    kind = arrays.dtype(dtype)
    z, targets = (8 * draw(9, 40)).astype(kind), some_ids(40, 9)
    expected, gradient = plain(z.astype(np.float64), targets, 0.1)
    local = Tensor(z[:, columns(comm, 40)].copy(), requires_grad=True)
    loss = vocab_parallel_cross_entropy(local, targets, comm, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == np.float32
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected.sum(), rtol=1e-5)
    assert local.grad.dtype == kind
    if comm.size == 1:  # the dense loss, which keeps its probabilities in 16 bits
        return
    mine = gradient[:, columns(comm, 40)]
    np.testing.assert_allclose(local.grad.astype(float), mine, rtol=1.01 * rounding, atol=1e-7)


def test_two_messages_whatever_the_vocabulary(comm: Communicator) -> None:
    z = Tensor(draw(6, 257)[:, columns(comm, 257)].copy(), requires_grad=True)
    loss = vocab_parallel_cross_entropy(z, some_ids(257, 6), comm, label_smoothing=0.1)
    loss.backward()
    assert comm.calls.total() == comm.calls["all_reduce"] == (2 if comm.size > 1 else 0)


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_target_outside_the_vocabulary_is_an_error_on_all_ranks(
    comm: Communicator, bad: int
) -> None:
    local = Tensor(draw(3, 10)[:, columns(comm, 10)])
    with pytest.raises(ConfigError, match=rf"targets\[1\]={bad}"):
        vocab_parallel_cross_entropy(local, np.array([1, bad, 3]), comm)


def test_settings_that_cannot_be(comm: Communicator) -> None:
    local, targets = Tensor(draw(3, 10)[:, columns(comm, 10)]), some_ids(10, 3)
    with pytest.raises(ConfigError, match="reduction='max'"):
        vocab_parallel_cross_entropy(local, targets, comm, reduction="max")
    with pytest.raises(ConfigError, match=r"label_smoothing=1\.5"):
        vocab_parallel_cross_entropy(local, targets, comm, label_smoothing=1.5)
    with pytest.raises(BufferMismatchError, match=r"targets\.shape=\(2,\)"):
        vocab_parallel_cross_entropy(local, targets[:2], comm)


def test_all_targets_ignored(comm: Communicator) -> None:
    local = Tensor(draw(3, 10)[:, columns(comm, 10)].copy(), requires_grad=True)
    targets = np.full(3, IGNORED)
    loss = vocab_parallel_cross_entropy(local, targets, comm, reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert not local.grad.any()
    assert np.isnan(vocab_parallel_cross_entropy(local, targets, comm).item())  # as PyTorch
