"""The mean over all tokens, the gradient sum over data ranks, and the clipped global norm."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpipar import arrays, partition
from mpipar.autograd import Tensor
from mpipar.errors import ConfigError
from mpipar.nn import Linear, Parameter, Partial, Spec
from mpipar.parallel.clip import clip_factor, clip_grad_norm
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.data import sum_gradients
from mpipar.parallel.loss import token_mean
from mpipar.parallel.mesh import Mesh
from tests.mpi.helpers import draw

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


# ---- token_mean


def losses_of(layer: Linear, x: np.ndarray) -> Tensor:
    """One loss a row."""
    return (layer(Tensor(x)) ** 2).sum()


def test_the_mean_over_all_tokens_and_its_gradient(comm: Communicator) -> None:
    """Ranks have 9 rows in uneven blocks; the gradients add up to those of all rows at once."""
    x = draw(9, 4)
    whole = Linear(4, 3, seed=1, dtype="float64")
    expected = losses_of(whole, x) / 9
    expected.backward()
    local = Linear(4, 3, seed=1, dtype="float64")
    mine = x[partition.block(9, comm.size, comm.rank)]
    loss = token_mean(losses_of(local, mine), len(mine), comm)
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-12)
    loss.backward()
    sum_gradients(local.parameters(), comm)
    for param, full in zip(local.parameters(), whole.parameters(), strict=True):
        np.testing.assert_allclose(param.grad, full.grad, **EXACT)


def test_it_is_no_mean_of_means(comm: Communicator) -> None:
    value, count = (12.0, 3) if comm.rank == 0 else (8.0, 1)
    loss_sum = Tensor(np.array(value), requires_grad=True)
    loss = token_mean(loss_sum, count, comm)
    tokens = 3 + comm.size - 1
    np.testing.assert_allclose(loss.item(), (12 + 8 * (comm.size - 1)) / tokens)
    loss.backward()
    np.testing.assert_allclose(loss_sum.grad, 1 / tokens)
    assert comm.calls.total() == int(comm.size > 1)


def test_micro_batches_add_up_to_the_whole_batch(comm: Communicator) -> None:
    """Cases of 1, 4 and 2 rows a rank: with the total known, their means and gradients add up."""
    x = draw(comm.size, 7, 4)
    whole = Linear(4, 3, seed=1, dtype="float64")
    expected = losses_of(whole, x) / (7 * comm.size)
    expected.backward()
    local, loss = Linear(4, 3, seed=1, dtype="float64"), 0.0
    for rows in (slice(0, 1), slice(1, 5), slice(5, 7)):
        part = x[comm.rank, rows]
        mean = token_mean(losses_of(local, part), len(part), comm, total=7 * comm.size)
        mean.backward()
        loss += mean.item()
    sum_gradients(local.parameters(), comm)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-12)
    for param, full in zip(local.parameters(), whole.parameters(), strict=True):
        np.testing.assert_allclose(param.grad, full.grad, **EXACT)


def test_ranks_without_a_token_take_part(comm: Communicator) -> None:
    has = comm.rank == 0
    loss_sum = Tensor(np.array(6.0 if has else 0.0, np.float32), requires_grad=has)
    loss = token_mean(loss_sum, 3 if has else 0, comm)
    assert loss.item() == 2.0
    assert loss.dtype == np.float32
    loss.backward()
    assert token_mean(np.array(6.0 if has else 0.0), 3 if has else 0, comm) == 2.0


def test_no_token_at_all_is_an_error_on_every_rank(comm: Communicator) -> None:
    with pytest.raises(ConfigError, match="valid token"):
        token_mean(Tensor(np.array(0.0)), 0, comm)


# ---- sum_gradients


def test_gradients_are_added_in_one_message_a_dtype(comm: Communicator) -> None:
    params = [
        Parameter(draw(3, 4)),
        Parameter(draw(5).astype(np.float32)),
        Parameter(draw(2, 2)),
        Parameter(draw(1, 7).astype(np.float32)),
    ]
    for i, param in enumerate(params):
        param.grad = (draw(*param.shape, seed=10 * i + comm.rank)).astype(param.dtype)
    sum_gradients([*params, params[0]], comm)  # the tied one once
    assert comm.calls.total() == comm.calls["all_reduce"] == (2 if comm.size > 1 else 0)
    for i, param in enumerate(params):
        terms = [draw(*param.shape, seed=10 * i + r).astype(param.dtype) for r in range(comm.size)]
        np.testing.assert_allclose(param.grad, sum(terms), rtol=1e-5, atol=1e-6)
        assert param.grad.dtype == param.dtype


def test_what_only_one_rank_used_comes_to_all(comm: Communicator) -> None:
    param, unused = Parameter(np.ones(3)), Parameter(np.ones(2))
    if comm.rank == 0:
        param.grad = np.array([1.0, 2.0, 3.0])
    sum_gradients([param, unused], comm)
    np.testing.assert_array_equal(param.grad, [1.0, 2.0, 3.0])
    if comm.size > 1:
        np.testing.assert_array_equal(unused.grad, [0.0, 0.0])


@pytest.mark.parametrize("length", [1, 7, 1000, 300_000])
def test_sums_of_any_length(comm: Communicator, length: int) -> None:
    param = Parameter(np.zeros(length))
    param.grad = np.arange(length) + float(comm.rank)
    sum_gradients([param], comm)
    ranks = comm.size
    np.testing.assert_array_equal(param.grad, ranks * np.arange(length) + ranks * (ranks - 1) / 2)


def test_half_precision_gradients_are_added_in_float32(comm: Communicator) -> None:
    param = Parameter(np.zeros(3, arrays.dtype("bfloat16")))
    param.grad = np.full(3, 1.0 if comm.rank == 0 else 2.0**-9, param.dtype)
    sum_gradients([param], comm)
    total = np.float32(1 + (comm.size - 1) * 2.0**-9)
    assert (param.grad == total.astype(param.dtype)).all()


# ---- clip_grad_norm


def sharded(mesh: Mesh, name: str, grad: np.ndarray, axes: dict[str, int]) -> Parameter:
    """A parameter with this rank's block of a global gradient, cut over each axis given."""
    spec = Spec.replicated(name, grad.shape)
    for axis, dim in axes.items():
        group = mesh.group(axis)
        spec = spec.shard(axis, dim, group.rank, group.size)
    param = Parameter(np.zeros(spec.local_shape, grad.dtype), spec)
    param.grad = np.array(spec.take(grad))
    return param


def meshes(raw: MPI.Intracomm) -> Iterator[Mesh]:
    p = raw.size
    shapes = [{"tp": p}, {"dp": p}]
    if p == 4:
        shapes += [{"tp": 2}, {"tp": 2, "cp": 2}]
    for shape in shapes:
        with Mesh(raw, **shape) as mesh:
            yield mesh


def test_the_norm_counts_every_element_once(raw: MPI.Intracomm) -> None:
    grads = {"a": draw(7, 5), "b": draw(9), "c": draw(6, 4, seed=4), "d": draw(3, seed=5)}
    expected = np.sqrt(sum((g**2).sum() for g in grads.values()))
    for mesh in meshes(raw):
        params = [
            sharded(mesh, "a", grads["a"], {"tp": 0}),
            sharded(mesh, "b", grads["b"], {}),
            sharded(mesh, "c", grads["c"], {"tp": 1, "dp": 0}),
            sharded(mesh, "d", grads["d"], {"dp": 0}),
        ]
        norm = clip_grad_norm([*params, params[1]], 0.5, mesh)  # the tied one once
        np.testing.assert_allclose(norm, expected, rtol=1e-12)
        for param, whole in zip(params, grads.values(), strict=True):
            scaled = param.spec.take(whole) * (0.5 / (expected + 1e-6))
            np.testing.assert_allclose(param.grad, scaled, rtol=1e-12)
        np.testing.assert_allclose(clip_grad_norm(params, None, mesh), 0.5, rtol=1e-5)


def test_one_message_for_each_set_of_axes(raw: MPI.Intracomm) -> None:
    with Mesh(raw, tp=raw.size) as mesh:
        params = [sharded(mesh, f"{i}", draw(8), {"tp": 0} if i % 2 else {}) for i in range(6)]
        clip_grad_norm(params, 1.0, mesh)
        assert mesh.tp.calls.total() == int(raw.size > 1)
        assert mesh.world.calls.total() == mesh.dp.calls.total() == 0


def test_small_gradients_stay_and_the_object_too(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:
        param, empty = Parameter(np.zeros(2)), Parameter(np.zeros(3))
        param.grad = grad = np.array([0.3, 0.4])
        assert clip_grad_norm([param, empty], 1.0, mesh) == pytest.approx(0.5)
        assert grad.tolist() == [0.3, 0.4]
        clip_grad_norm([param, empty], 0.1, mesh)
        assert param.grad is grad
        np.testing.assert_allclose(grad, [0.06, 0.08], rtol=1e-5)
        assert empty.grad is None


def test_stages_of_a_pipeline_are_joined_and_tied_parameters_count_once(
    raw: MPI.Intracomm,
) -> None:
    """Stages hold different numbers of parameters; "table" is on the first and the last."""
    if raw.size == 1:
        return
    with Mesh(raw, pp=raw.size) as mesh:
        stage, last = mesh.pp.rank, raw.size - 1
        own = [Parameter(np.zeros(2), Spec.replicated(f"w{stage}.{i}", (2,))) for i in range(stage)]
        own.append(Parameter(np.zeros(1)))  # without a name: one a stage
        if stage in (0, last):
            own.append(Parameter(np.zeros(2), Spec.replicated("table", (2,))))
        for param in own:
            param.grad = np.ones(param.shape)
        elements = 2 * sum(range(raw.size)) + raw.size + 2
        norm = clip_grad_norm(own, 0.1, mesh)
        np.testing.assert_allclose(norm, np.sqrt(elements), rtol=1e-12)
        assert len(set(raw.allgather(norm))) == 1


def test_parameters_of_unnamed_layers_all_count(raw: MPI.Intracomm) -> None:
    """Their specs are called "weight" on every stage, though they are not the same."""
    with Mesh(raw, pp=raw.size) as mesh:
        own = [Linear(2, 3).weight for _ in range(2)]
        for param in own:
            param.grad = np.ones(param.shape)
        norm = clip_grad_norm(own, None, mesh)
        np.testing.assert_allclose(norm, np.sqrt(12 * raw.size), rtol=1e-12)


def test_without_a_mesh_nothing_is_sent(raw: MPI.Intracomm) -> None:
    param = Parameter(np.zeros(2))
    if raw.rank == 0:  # alone
        param.grad = np.array([3.0, 4.0])
        assert clip_grad_norm([param], 1.0) == 5.0
        np.testing.assert_allclose(param.grad, [0.6, 0.8], rtol=1e-5)
    spec = Spec.replicated("w", (4, 2))
    assert clip_grad_norm([Parameter(np.zeros((4, 2)), spec.shard("tp", 0, 0, 1))], 1.0) == 0.0
    with pytest.raises(ConfigError, match="w is cut over tp"):
        clip_grad_norm([Parameter(np.zeros((2, 2)), spec.shard("tp", 0, 0, 2))], 1.0)
    with pytest.raises(ConfigError, match=r"instead of named_parameters"):
        clip_grad_norm(Linear(2, 3).named_parameters(), 1.0)


def test_float32_squares_are_summed_in_float64(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:
        param = Parameter(np.zeros(300_001, np.float32))
        param.grad = np.full(300_001, 1e-3, np.float32)
        param.grad[0] = 1e3
        exact = np.sqrt((param.grad.astype(np.float64) ** 2).sum())
        np.testing.assert_allclose(clip_grad_norm([param], 1.0, mesh), exact, rtol=1e-13)
        assert param.grad.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_small_factor_is_not_rounded_to_16_bits(raw: MPI.Intracomm, dtype: str) -> None:
    with Mesh(raw) as mesh:
        param = Parameter(np.zeros(4, arrays.dtype(dtype)))
        param.grad = np.full(4, 30000, param.dtype)
        clip_grad_norm([param], 1e-3, mesh)
        np.testing.assert_allclose(param.grad.astype(float), 5e-4, rtol=2.0**-7)


def test_gradients_that_are_not_finite_are_reported_and_left(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:
        for bad in (np.inf, np.nan):
            param = Parameter(np.zeros(2))
            param.grad = np.array([1.0, bad])
            assert not np.isfinite(clip_grad_norm([param], 1.0, mesh))
            assert param.grad[0] == 1.0


def test_a_factor_clips_like_a_pass_over_the_gradients() -> None:
    assert clip_factor(8.0, 2.0, eps=0.0) == 0.25
    assert clip_factor(1.0, 2.0) == clip_factor(0.0, 2.0) == 1.0
    assert clip_factor(float("nan"), 2.0) == clip_factor(float("inf"), 2.0) == 1.0


def test_what_cannot_be_clipped(raw: MPI.Intracomm) -> None:
    with Mesh(raw) as mesh:
        param = Parameter(np.zeros(2), Spec.replicated("w", (2,)).place("tp", Partial()))
        with pytest.raises(ConfigError, match="Partial over tp"):
            clip_grad_norm([param], 1.0, mesh)
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grad_norm([], -1.0, mesh)
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grad_norm([], float("nan"), mesh)
