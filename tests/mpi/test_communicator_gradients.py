"""Each differentiable method of Communicator is a linear map A with its adjoint A':

<A x, y> = <x, A' y>, summed over ranks.  And backward never hangs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
from mpipar.partition import blocks

Map = Callable[[mp.Communicator, Any], Any]


def shape(comm: mp.Communicator) -> tuple[int, ...]:
    """Uneven along dim 0."""
    return (comm.rank % 3 + 1, 7, 2)


LINEAR: dict[str, tuple[Map, bool]] = {  # the map, and whether ranks bring different shapes
    "all_reduce": (lambda c, x: c.all_reduce(x), False),
    "all_reduce mean": (lambda c, x: c.all_reduce(x, op="mean"), False),
    "all_gather": (lambda c, x: c.all_gather(x, dim=1), False),
    "all_gather exchange": (lambda c, x: c.all_gather(x, dim=0, sizes="exchange"), True),
    "all_gather sizes": (
        lambda c, x: c.all_gather(x, dim=0, sizes=[r % 3 + 1 for r in range(c.size)]),
        True,
    ),
    "reduce_scatter": (lambda c, x: c.reduce_scatter(x, dim=1), False),
    "reduce_scatter mean": (lambda c, x: c.reduce_scatter(x, dim=0, op="mean"), False),
    "reduce_scatter sizes": (
        lambda c, x: c.reduce_scatter(x, dim=1, sizes=(0,) * (c.size - 1) + (7,)),
        False,
    ),
    "all_to_all": (lambda c, x: c.all_to_all(x, 1, 2), False),
    "all_to_all exchange": (lambda c, x: c.all_to_all(x, 1, 0, sizes="exchange"), True),
    "broadcast": (lambda c, x: c.broadcast(x, src=c.size - 1), False),
    "reduce": (lambda c, x: c.reduce(x, dst=c.size - 1), False),
    "reduce mean": (lambda c, x: c.reduce(x, op="mean"), False),
    "gather": (lambda c, x: c.gather(x, dst=c.size // 2, dim=0), True),
    "gather dim 1": (lambda c, x: c.gather(x, dim=1), False),
    "scatter": (lambda c, x: c.scatter(x, src=c.size - 1, dim=1), False),
    "shift": (lambda c, x: c.shift(x, 1), False),
    "shift back": (lambda c, x: c.shift(x, -2), False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_adjoint(comm: mp.Communicator, name: str) -> None:
    apply, uneven = LINEAR[name]
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal(shape(comm) if uneven else (3, 7, 2))
    tensor = mp.Tensor(x, requires_grad=True)
    result = apply(comm, tensor)
    y = rng.standard_normal(result.shape)
    result.backward(y)
    image = apply(comm, x)  # the array call gives the same values, or None where there are none
    if image is None:
        assert result.size == 0
    else:
        np.testing.assert_array_equal(image, result.data)
    gradient = np.zeros_like(x) if tensor.grad is None else tensor.grad
    products = np.array([np.vdot(result.data, y), np.vdot(x, gradient)])
    left, right = comm.all_reduce(products)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_extreme_gets_the_gradient_and_ties_share_it(comm: mp.Communicator, op: str) -> None:
    p, r = comm.size, comm.rank
    x = np.array([float(r), 5.0, float(-r), float(r // 2)])
    tensor = mp.Tensor(x, requires_grad=True)
    (comm.all_reduce(tensor, op=op) * np.arange(1.0, 5.0)).sum().backward()
    values = np.array([[q, 5.0, -q, q // 2] for q in range(p)], float)
    extreme = values.max(0) if op == "max" else values.min(0)
    holders = (values == extreme).sum(0)
    np.testing.assert_allclose(tensor.grad, p * np.arange(1.0, 5.0) * (x == extreme) / holders)


def test_the_product_is_exact_with_zeros(comm: mp.Communicator) -> None:
    p, r = comm.size, comm.rank
    rows = np.random.default_rng(5).standard_normal((p, 6))
    rows[0, 1] = 0.0
    rows[: min(p, 2), 2] = 0.0
    tensor = mp.Tensor(rows[r], requires_grad=True)
    comm.all_reduce(tensor, op="prod").sum().backward()
    expected = p * np.prod(np.delete(rows, r, axis=0), axis=0)
    np.testing.assert_allclose(tensor.grad, expected, rtol=1e-12)


def test_a_loss_on_one_rank_only(comm: mp.Communicator) -> None:
    """Backward runs every recorded collective on every rank, with zeros where nothing arrived."""
    x = mp.Tensor(np.full(3, comm.rank + 1.0), requires_grad=True)
    y = comm.all_gather(x)
    z = comm.all_reduce(y * 2.0)
    loss = (z * z).sum() if comm.rank == 0 else mp.Tensor(0.0)
    loss.backward()
    total = sum(q + 1.0 for q in range(comm.size))
    z_value = 2.0 * comm.size * np.repeat(np.arange(1.0, comm.size + 1), 3)
    np.testing.assert_allclose(z.data, z_value)
    mine = 2 * z_value[3 * comm.rank] * 2.0 * comm.size
    np.testing.assert_allclose(x.grad, mine)
    assert total > 0


def test_recorded_whatever_requires_grad_says(comm: mp.Communicator) -> None:
    """Only rank 0's x requires a gradient; the others take part in its backward."""
    x = mp.Tensor(np.ones(4), requires_grad=comm.rank == 0)
    comm.all_reduce(x).sum().backward()
    if comm.rank == 0:
        np.testing.assert_array_equal(x.grad, np.full(4, comm.size))
    else:
        assert x.grad is None


def test_without_gradients_nothing_is_recorded(comm: mp.Communicator) -> None:
    x = mp.Tensor(np.ones(4), requires_grad=True)
    with mp.no_grad():
        y = comm.all_reduce(x)
    before = comm.calls["all_reduce"]
    (x * 2.0).sum().backward()
    assert not y.requires_grad
    assert comm.calls["all_reduce"] == before


def test_recompute_runs_the_same_collectives(comm: mp.Communicator) -> None:
    from mpipar.autograd import recompute

    def f(x: Any) -> Any:
        return comm.all_reduce(x * x)

    grads = []
    for run in (f, lambda x: recompute(f, x)):
        x = mp.Tensor(np.arange(3.0) + comm.rank, requires_grad=True)
        loss = run(x).sum() if comm.rank == 0 else mp.Tensor(0.0)
        if comm.rank != 0:
            run(x)
        loss.backward()
        grads.append(x.grad)
    np.testing.assert_allclose(grads[0], grads[1])


def test_tensors_take_no_out_and_no_handles(comm: mp.Communicator) -> None:
    x = mp.Tensor(np.ones(4), requires_grad=True)
    for call in (
        lambda: comm.all_reduce(x, out=np.ones(4)),
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.all_reduce(x, op=MPI.Op.Create(lambda a, b, t: None)),
        lambda: comm.reduce_scatter(x, op="max"),
        lambda: comm.send(x),
        lambda: comm.sendrecv(x),
    ):
        with pytest.raises(ValueError, match="="):
            call()


def test_sizes_of_blocks(comm: mp.Communicator) -> None:
    x = mp.Tensor(np.ones((2, 7)), requires_grad=True)
    block = comm.slice(x, dim=1, scale_grad=True)
    assert block.shape == (2, blocks(7, comm.size)[comm.rank])
    block.sum().backward()
    np.testing.assert_allclose(x.grad, 1.0 / comm.size)
