"""Column- and row-parallel layers against the dense layers of the same seed."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from mpipar.autograd import Tensor, recompute
from mpipar.autograd import functional as F
from mpipar.errors import ConfigError
from mpipar.nn import Linear, Module, init
from mpipar.optim import SGD
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    require_divisible,
)
from tests.mpi.helpers import draw

DIM, HIDDEN, ROWS = 12, 24, 5  # 12 and 24 divide over 1, 2, 3 and 4 ranks
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


class Two(Module):
    """down(tanh(up(x))) + x: the shape of an MLP, with a replicated layer before it."""

    def __init__(self, first: Module, up: Module, down: Module) -> None:
        self.first, self.up, self.down = first, up, down

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h + self.down(self.up(h).tanh())


def dense(std: float | None = None) -> Two:
    return Two(
        Linear(DIM, DIM, seed=1, name="first", dtype="float64"),
        Linear(DIM, HIDDEN, seed=1, name="up", std=std, dtype="float64"),
        Linear(HIDDEN, DIM, seed=1, name="down", std=std, dtype="float64"),
    )


def parallel(comm: Communicator, std: float | None = None) -> Two:
    settings: dict[str, Any] = {"seed": 1, "std": std, "dtype": "float64"}
    return Two(
        Linear(DIM, DIM, seed=1, name="first", dtype="float64"),
        ColumnParallelLinear(DIM, HIDDEN, comm, name="up", **settings),
        RowParallelLinear(HIDDEN, DIM, comm, name="down", **settings),
    )


def assert_shards(local: Module, whole: Module, of: Callable[[Any], Any]) -> None:
    """Every parameter's array is the slice of the dense one that its spec names."""
    dense_ones = dict(whole.named_parameters())
    for name, param in local.named_parameters():
        expected = param.spec.take(of(dense_ones[name]))
        assert param.data.shape == param.spec.local_shape
        np.testing.assert_allclose(of(param), expected, err_msg=name, **EXACT)


@pytest.mark.parametrize("std", [None, 0.02])
def test_a_shard_is_the_slice_of_the_dense_layer(comm: Communicator, std: float | None) -> None:
    local, whole = parallel(comm, std), dense(std)
    for (name, param), (_, full) in zip(
        local.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert (param.data == param.spec.take(full.data)).all(), name
        assert param.spec.name == full.spec.name == name


def test_loss_gradients_and_a_step_are_those_of_the_dense_layers(comm: Communicator) -> None:
    x, target = draw(2, ROWS, DIM), draw(2, ROWS, DIM, seed=4)
    losses, inputs = [], []
    models = [dense(), parallel(comm)]
    for model in models:
        leaf = Tensor(x, requires_grad=True)
        loss = ((model(leaf) - target) ** 2).sum()
        loss.backward()
        losses.append(loss.item())
        inputs.append(leaf.grad)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)
    np.testing.assert_allclose(inputs[1], inputs[0], **EXACT)
    assert_shards(models[1], models[0], lambda param: param.grad)
    for model in models:
        SGD(model.parameters(), lr=0.1).step()
    assert_shards(models[1], models[0], lambda param: param.data)


def test_replicated_parameters_get_the_same_gradient_on_every_rank(comm: Communicator) -> None:
    model = parallel(comm)
    (model(Tensor(draw(ROWS, DIM))) ** 2).sum().backward()
    for param in (model.first.weight, model.first.bias, model.down.bias):
        low, high = comm.all_reduce(param.grad, op="min"), comm.all_reduce(param.grad, op="max")
        assert (low == high).all()


def test_one_all_reduce_forward_and_one_backward(comm: Communicator) -> None:
    model, once = parallel(comm), int(comm.size > 1)
    before = comm.calls.total()
    loss = model(Tensor(draw(ROWS, DIM))).sum()
    assert comm.calls.total() - before == once
    loss.backward()
    assert comm.calls.total() - before == 2 * once
    assert comm.calls["all_reduce"] == comm.calls.total()


def test_recomputation_runs_the_same_collectives_again(comm: Communicator) -> None:
    x, y, once = draw(ROWS, DIM), draw(ROWS, DIM, seed=4), int(comm.size > 1)
    kept, again = parallel(comm), parallel(comm)
    (kept(Tensor(x)) * y).sum().backward()
    before = comm.calls.total()
    (recompute(again, Tensor(x)) * y).sum().backward()
    assert comm.calls.total() - before == 3 * once  # forward, forward again, backward
    for param, other in zip(kept.parameters(), again.parameters(), strict=True):
        np.testing.assert_allclose(other.grad, param.grad, **EXACT)


def test_recomputation_on_a_rank_that_has_no_loss(comm: Communicator) -> None:
    out = recompute(parallel(comm), Tensor(draw(ROWS, DIM)))
    before = comm.calls.total()
    (out.sum() if comm.rank == 0 else Tensor(np.zeros(()))).backward()
    assert comm.calls.total() - before == 2 * int(comm.size > 1)


@pytest.mark.parametrize("bias", [True, False])
def test_gathered_output_and_whole_input(comm: Communicator, bias: bool) -> None:
    x = draw(3, DIM)
    whole = [
        Linear(DIM, HIDDEN, bias, seed=2, name="a", dtype="float64"),
        Linear(HIDDEN, DIM, bias, seed=2, name="b", dtype="float64"),
    ]
    local: list[Any] = [
        ColumnParallelLinear(
            DIM, HIDDEN, comm, bias, gather_output=True, seed=2, name="a", dtype="float64"
        ),
        RowParallelLinear(
            HIDDEN, DIM, comm, bias, input_is_parallel=False, seed=2, name="b", dtype="float64"
        ),
    ]
    grads = []
    for a, b in (whole, local):
        leaf = Tensor(x, requires_grad=True)
        h = a(leaf)
        assert h.shape == (3, HIDDEN)
        out = b(h.tanh())
        (out * draw(3, DIM, seed=5)).sum().backward()
        grads.append((out.data, leaf.grad))
    np.testing.assert_allclose(grads[1][0], grads[0][0], **EXACT)
    np.testing.assert_allclose(grads[1][1], grads[0][1], **EXACT)
    for one, full in zip(local, whole, strict=True):
        assert_shards(one, full, lambda param: param.grad)


def test_fused_parts_are_cut_one_by_one_and_come_back_in_order(comm: Communicator) -> None:
    parts = (DIM, 2 * DIM, DIM)
    whole = Linear(DIM, sum(parts), seed=2, name="qkv", dtype="float64")
    local = ColumnParallelLinear(
        DIM, sum(parts), comm, gather_output=True, parts=parts, seed=2, name="qkv", dtype="float64"
    )
    x, y = draw(3, DIM), draw(3, sum(parts), seed=5)
    pieces = np.split(whole(Tensor(x)).data, np.cumsum(parts)[:-1], axis=1)
    mine = [np.split(piece, comm.size, axis=1)[comm.rank] for piece in pieces]
    np.testing.assert_allclose(local.local_forward(Tensor(x)).data, np.hstack(mine), **EXACT)
    outs = []
    for layer in (whole, local):
        out = layer(Tensor(x))
        (out * y).sum().backward()
        outs.append(out.data)
    np.testing.assert_allclose(outs[1], outs[0], **EXACT)
    assert_shards(local, whole, lambda param: param.grad)


def test_from_full(comm: Communicator) -> None:
    x = draw(4, DIM)
    up, up_bias = draw(HIDDEN, DIM, seed=6), draw(HIDDEN, seed=7)
    down, down_bias = draw(DIM, HIDDEN, seed=8), draw(DIM, seed=9)
    column = ColumnParallelLinear.from_full(up, up_bias, comm)
    row = RowParallelLinear.from_full(down, down_bias, comm)
    expected = np.tanh(x @ up.T + up_bias) @ down.T + down_bias
    np.testing.assert_allclose(row(column(Tensor(x)).tanh()).data, expected, **EXACT)
    np.testing.assert_array_equal(column.weight.data, np.split(up, comm.size)[comm.rank])
    np.testing.assert_array_equal(row.bias.data, down_bias)
    assert not np.shares_memory(column.weight.data, up)
    assert not np.shares_memory(row.bias.data, down_bias)
    assert RowParallelLinear.from_full(down, None, comm).bias is None
    alone = ColumnParallelLinear.from_full(up.astype(np.float32), None, comm, gather_output=True)
    assert alone.weight.dtype == np.float32
    out = alone(Tensor(x.astype(np.float32))).data
    np.testing.assert_allclose(out, x @ up.T, rtol=1e-5, atol=1e-5)


def test_local_forward_sends_nothing(comm: Communicator) -> None:
    column = ColumnParallelLinear(DIM, HIDDEN, comm, dtype="float64")
    row = RowParallelLinear(HIDDEN, DIM, comm, dtype="float64")
    partial = row.local_forward(column.local_forward(Tensor(draw(2, DIM))))
    assert comm.calls.total() == 0
    total = comm.all_reduce(partial.data) + row.bias.data  # the bias once
    np.testing.assert_allclose(total, row(column(Tensor(draw(2, DIM)))).data, **EXACT)


def test_sizes_must_divide_and_the_message_says_what_would(comm: Communicator) -> None:
    if comm.size == 1:
        return
    size = 12 * comm.size + 1
    words = f"out_features={size}.*{comm.size} ranks.*{12 * comm.size} or {13 * comm.size}"
    with pytest.raises(ValueError, match=words):
        ColumnParallelLinear(4, size, comm)
    with pytest.raises(ConfigError, match=f"in_features={size}"):
        RowParallelLinear(size, 4, comm)
    with pytest.raises(ConfigError, match="every one of the parts"):
        ColumnParallelLinear(4, 6 * comm.size, comm, parts=(5 * comm.size + 1, comm.size - 1))
    with pytest.raises(ConfigError, match="in_features"):
        RowParallelLinear.from_full(np.ones((4, size)), None, comm)


def test_degrees_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"Nearest sizes: 8 or 12; nearest degrees.* 3 or 9"):
        require_divisible("out_features", 9, 4)
    with pytest.raises(ConfigError, match=r"Nearest sizes: 4; nearest degrees.* 3"):
        require_divisible("out_features", 3, 4)


def test_parts_of_an_input_that_is_not_cut_are_refused(comm: Communicator) -> None:
    with pytest.raises(ConfigError, match="input_is_parallel"):
        RowParallelLinear(DIM, DIM, comm, input_is_parallel=False, parts=(DIM // 2, DIM // 2))


@pytest.mark.parametrize("out", [1, 3, 7, 16])
def test_matmul_of_replicated_matrices(comm: Communicator, out: int) -> None:
    a, w, y = draw(6, 5), draw(out, 5, seed=4), draw(6, out, seed=5)
    tp = TensorParallel(comm)
    np.testing.assert_allclose(tp.matmul(a, w), a @ w.T, **EXACT)
    left, right = Tensor(a, requires_grad=True), Tensor(w, requires_grad=True)
    result = tp.matmul(left, right)
    np.testing.assert_allclose(result.data, a @ w.T, **EXACT)
    (result * y).sum().backward()
    np.testing.assert_allclose(left.grad, y @ w, **EXACT)
    np.testing.assert_allclose(right.grad, y.T @ a, **EXACT)


def test_matmul_in_few_messages(comm: Communicator) -> None:
    if comm.size == 1:
        return
    left, right = Tensor(draw(6, 5), requires_grad=True), Tensor(draw(8, 5), requires_grad=True)
    TensorParallel(comm).matmul(left, right).sum().backward()
    assert comm.calls == {"all_gather": 2, "all_reduce": 1}


def test_matmul_of_matrices_that_do_not_fit(comm: Communicator) -> None:
    with pytest.raises(ConfigError, match=r"w\.shape"):
        TensorParallel(comm).matmul(draw(6, 5), draw(4, 6))


def test_gelu_between_the_layers(comm: Communicator) -> None:
    """The activation acts on the block that a rank has: no message for it."""
    if not hasattr(F, "gelu"):
        pytest.skip("no gelu")
    x = Tensor(draw(2, DIM))
    up = ColumnParallelLinear(DIM, HIDDEN, comm, seed=1, name="up", dtype="float64")
    full = Linear(DIM, HIDDEN, seed=1, name="up", dtype="float64")
    block = np.split(F.gelu(full(x)).data, comm.size, axis=1)[comm.rank]
    np.testing.assert_allclose(F.gelu(up(x)).data, block, **EXACT)
    assert comm.calls.total() == 0


def test_layers_show_global_and_local_sizes(comm: Communicator) -> None:
    column, row = (kind(DIM, DIM, comm) for kind in (ColumnParallelLinear, RowParallelLinear))
    sizes = f"in_features={DIM}, out_features={DIM}, bias=True"
    part = DIM // comm.size
    assert repr(column) == f"ColumnParallelLinear({sizes}, local=({part}, {DIM}))"
    assert repr(row) == f"RowParallelLinear({sizes}, local=({DIM}, {part}))"


def test_unnamed_layers_are_slices_of_the_dense_ones_counted_alike(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights do not depend on the layout where the same layers are built in the same order."""

    def weights(*kinds: Callable[..., Module]) -> list[Any]:
        monkeypatch.setattr(init, "_unnamed", defaultdict(count))
        return [kind(DIM, DIM, dtype="float64").weight for kind in kinds]

    column, row = (partial(kind, comm=comm) for kind in (ColumnParallelLinear, RowParallelLinear))
    whole = weights(Linear, Linear, Linear)
    local = weights(column, row, column)
    for part, full in zip(local, whole, strict=True):
        np.testing.assert_array_equal(part.data, part.spec.take(full.data))
    assert not np.array_equal(local[0].data, local[2].data)
