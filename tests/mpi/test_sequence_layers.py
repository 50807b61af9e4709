"""Layers on blocks of the sequence, against dense ones: norms, column and row layers, tables."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import partition
from mpipar.autograd import Tensor, no_grad
from mpipar.errors import ConfigError, StateError
from mpipar.nn import LayerNorm, Linear, RMSNorm
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpipar.parallel.tensor.sequence import (
    SequenceLayerNorm,
    SequenceRMSNorm,
    SequenceShards,
    share,
)
from mpipar.parallel.tensor.vocab import VocabParallelEmbedding
from tests.mpi.helpers import draw

EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("shape", [(7, 12), (2, 7, 12), (2, 3, 2, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_on_blocks_of_the_sequence(
    comm: Communicator, shape: tuple[int, ...], bias: bool
) -> None:
    shards = SequenceShards(comm)
    cut: dict[str, Any] = {"sequence": shards, "seed": 1, "dtype": "float64"}
    dense: list[Any] = [
        LayerNorm(12, dtype="float64"),
        Linear(12, 24, bias, seed=1, name="up", dtype="float64"),
        Linear(24, 12, bias, seed=1, name="down", dtype="float64"),
        RMSNorm(12, dtype="float64"),
    ]
    local: list[Any] = [
        SequenceLayerNorm(comm, 12, dtype="float64"),
        ColumnParallelLinear(12, 24, comm, bias, name="up", **cut),
        RowParallelLinear(24, 12, comm, bias, name="down", **cut),
        SequenceRMSNorm(comm, 12, dtype="float64"),
    ]
    weights = draw(*shape, seed=5)
    seen: list[tuple[Any, Any]] = []
    for layers in (dense, local):
        leaf: Any = Tensor(draw(*shape), requires_grad=True)
        x, y = leaf, weights
        if layers is local:
            x, y = shards.shard(leaf, dim=-2), shards.shard(weights, dim=-2)
        norm1, up, down, norm2 = layers
        out = norm2(down(up(norm1(x)).tanh()) + x)
        assert out.shape == y.shape
        (out * y).sum().backward()
        seen.append((out.data, leaf.grad))
    np.testing.assert_allclose(seen[1][0], shards.shard(seen[0][0], dim=-2), **EXACT)
    np.testing.assert_allclose(seen[1][1], seen[0][1], **EXACT)
    for one, full in zip(local, dense, strict=True):
        for param, whole in zip(one.parameters(), full.parameters(), strict=True):
            np.testing.assert_allclose(param.grad, param.spec.take(whole.grad), **EXACT)


def test_gathered_output_and_whole_input(comm: Communicator) -> None:
    shards, x = SequenceShards(comm), draw(2, 5, 12)
    cut: dict[str, Any] = {"sequence": shards, "seed": 1, "name": "a", "dtype": "float64"}
    column = ColumnParallelLinear(12, 24, comm, gather_output=True, parts=(12, 12), **cut)
    whole = Linear(12, 24, seed=1, name="a", dtype="float64")
    out = column(shards.shard(Tensor(x), dim=1))
    np.testing.assert_allclose(out.data, whole(Tensor(x)).data, **EXACT)
    row = RowParallelLinear(12, 24, comm, input_is_parallel=False, **cut)
    np.testing.assert_allclose(
        row(Tensor(x)).data, shards.shard(whole(Tensor(x)).data, dim=1), **EXACT
    )


def test_what_is_kept_for_backward_is_this_ranks_block(comm: Communicator) -> None:
    """The gathered input of a column layer is gone when forward is done."""
    shards = SequenceShards(comm)
    column = ColumnParallelLinear(64, comm.size, comm, sequence=shards)
    x = shards.shard(Tensor(draw(1, 4096, 64).astype(np.float32)), dim=1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        y = column(x)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < y.data.nbytes + 4096 * 64 * 4 / 4


def test_embedding_and_logits_between_blocks(comm: Communicator) -> None:
    shards, ids = SequenceShards(comm), np.array([[1, 4, 9, 0, 9], [2, 2, 3, 8, 7]])
    table = VocabParallelEmbedding(10, 6, comm, sequence=shards, name="t", dtype="float64")
    full = comm.all_gather(table.weight.data, dim=0, sizes=partition.blocks(10, comm.size))
    rows = table(ids)
    np.testing.assert_array_equal(rows.data, shards.shard(full[ids], dim=1))
    logits = table.logits(rows)
    columns = partition.block(10, comm.size, comm.rank)
    np.testing.assert_allclose(logits.data, (full[ids] @ full.T)[..., columns], **EXACT)


def test_a_block_of_another_length_is_an_error(comm: Communicator) -> None:
    if comm.size == 1:
        return
    shards = SequenceShards(comm)
    column = ColumnParallelLinear(12, 12, comm, sequence=shards)
    with pytest.raises(StateError, match="sequence of None"):
        column(Tensor(draw(2, 3, 12)))
    shards.shard(np.arange(10))
    with pytest.raises(StateError, match=r"sequence of 10.*shard"):
        column(Tensor(draw(2, 10, 12)))
    assert comm.calls.total() == 0


def test_a_cut_over_another_communicator_is_an_error(comm: Communicator) -> None:
    with Communicator(MPI.COMM_SELF) as other:
        for layer in (ColumnParallelLinear, RowParallelLinear):
            with pytest.raises(ConfigError, match="own communicator"):
                layer(12, 12, comm, sequence=SequenceShards(other))


def test_gradients_of_shared_parameters_travel_together(comm: Communicator) -> None:
    one, two = (Tensor(draw(n), requires_grad=True) for n in (3, 5))
    with no_grad():
        assert share(comm, one, two)[1].data is two.data
    a, b = share(comm, one, two)
    ((a * comm.rank).sum() + (b[:2] * 2).sum()).backward()
    assert comm.calls == ({"all_reduce": 1} if comm.size > 1 else {})
    np.testing.assert_array_equal(one.grad, np.full(3, sum(range(comm.size))))
    np.testing.assert_array_equal(two.grad, np.array([2, 2, 0, 0, 0]) * comm.size)
