"""The pairs for replicated values: each has its own identity between forward and gradient.

A replicated value is ONE value, so it counts once in an inner product; values that differ by rank
count on every rank.  x -> A x, y the gradient of the output:

    replicated -> by rank      sum over ranks of <A x, y_r> = <x, grad>
    by rank -> replicated      <A x, y> = sum over ranks of <x_r, grad_r>
    by rank -> by rank         sum over ranks on both sides
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpipar import partition
from mpipar.autograd import Tensor
from mpipar.errors import ConfigError
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.replicated import (
    all_gather_sequence,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
    slice_of,
)

LENGTHS = (1, 7, 8, 9)


def draw(*shape: int, rank: int | None = None) -> np.ndarray:
    """Numbers that are the same on every rank, or differ by rank."""
    return np.random.default_rng(7 if rank is None else 100 + rank).standard_normal(shape)


def over_ranks(comm: Communicator, a: np.ndarray, b: np.ndarray) -> float:
    return float(comm.all_reduce(np.array([np.vdot(a, b)]))[0])


def agree(comm: Communicator, x: np.ndarray) -> None:
    """All ranks hold the same bits."""
    assert (comm.all_reduce(x, op="max") == comm.all_reduce(x, op="min")).all()


def run(function: Callable[[Tensor], Tensor], x: np.ndarray, y: Any) -> tuple[Tensor, np.ndarray]:
    """Return output and gradient of the input, for the gradient y of the output."""
    leaf = Tensor(x, requires_grad=True)
    out = function(leaf)
    out.backward(y(out.shape) if callable(y) else y)
    assert leaf.grad is not None
    return out, leaf.grad


def test_copy_to(comm: Communicator) -> None:
    for n in LENGTHS:
        x, y = draw(3, n), draw(3, n, rank=comm.rank)
        out, grad = run(partial(copy_to, comm), x, y)
        np.testing.assert_array_equal(out.data, x)
        np.testing.assert_allclose(over_ranks(comm, out.data, y), np.vdot(x, grad), rtol=1e-12)
        agree(comm, grad)


def test_reduce_from(comm: Communicator) -> None:
    for n in LENGTHS:
        x, y = draw(3, n, rank=comm.rank), draw(3, n)
        out, grad = run(partial(reduce_from, comm), x, y)
        expected = sum(draw(3, n, rank=r) for r in range(comm.size))
        np.testing.assert_allclose(out.data, expected, rtol=1e-12)
        agree(comm, out.data)
        np.testing.assert_allclose(np.vdot(out.data, y), over_ranks(comm, x, grad), rtol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_to(comm: Communicator, dim: int) -> None:
    for n in LENGTHS:
        x = np.moveaxis(draw(n, 2, 3), 0, dim)
        out, grad = run(partial(scatter_to, comm, dim=dim), x, lambda s: draw(*s, rank=comm.rank))
        y = draw(*out.shape, rank=comm.rank)
        np.testing.assert_array_equal(out.data, np.array_split(x, comm.size, dim)[comm.rank])
        np.testing.assert_allclose(over_ranks(comm, out.data, y), np.vdot(x, grad), rtol=1e-12)
        agree(comm, grad)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_from(comm: Communicator, dim: int) -> None:
    for n in LENGTHS:
        sizes = partition.blocks(n, comm.size)
        x = np.moveaxis(draw(sizes[comm.rank], 2, 3, rank=comm.rank), 0, dim)
        out, grad = run(partial(gather_from, comm, dim=dim, sizes=sizes), x, lambda s: draw(*s))
        assert out.shape[dim] == n
        y = draw(*out.shape)
        agree(comm, out.data)
        np.testing.assert_allclose(np.vdot(out.data, y), over_ranks(comm, x, grad), rtol=1e-12)


def test_gather_from_undoes_scatter_to(comm: Communicator) -> None:
    for n in LENGTHS:
        x = draw(2, n)
        back = gather_from(comm, scatter_to(comm, x), sizes=partition.blocks(n, comm.size))
        np.testing.assert_array_equal(back, x)


def test_all_gather_sequence(comm: Communicator) -> None:
    for n in LENGTHS:
        sizes = partition.blocks(n, comm.size)
        x = draw(2, sizes[comm.rank], 3, rank=comm.rank)
        y = draw(2, n, 3, rank=comm.rank + 10)
        out, grad = run(partial(all_gather_sequence, comm, sizes=sizes), x, y)
        agree(comm, out.data)
        left, right = over_ranks(comm, out.data, y), over_ranks(comm, x, grad)
        np.testing.assert_allclose(left, right, rtol=1e-11)


def test_reduce_scatter_sequence(comm: Communicator) -> None:
    for n in LENGTHS:
        x = draw(2, n, 3, rank=comm.rank)
        out, grad = run(
            lambda t: reduce_scatter_sequence(comm, t), x, lambda s: draw(*s, rank=comm.rank + 10)
        )
        y = draw(*out.shape, rank=comm.rank + 10)
        total = sum(draw(2, n, 3, rank=r) for r in range(comm.size))
        block = np.array_split(total, comm.size, 1)[comm.rank]
        np.testing.assert_allclose(out.data, block, rtol=1e-12, atol=1e-14)
        left, right = over_ranks(comm, out.data, y), over_ranks(comm, x, grad)
        np.testing.assert_allclose(left, right, rtol=1e-11)


@pytest.mark.parametrize("scale", [False, True])
def test_slice_gathers_the_gradients(comm: Communicator, scale: bool) -> None:
    for n in LENGTHS:
        x = draw(2, n)
        out, grad = run(
            lambda t: slice_of(comm, t, scale_grad=scale), x, lambda s: draw(*s, rank=comm.rank)
        )
        y = draw(*out.shape, rank=comm.rank)
        factor = comm.size if scale else 1
        left, right = over_ranks(comm, out.data, y), factor * np.vdot(x, grad)
        np.testing.assert_allclose(left, right, rtol=1e-11)
        agree(comm, grad)


def test_a_loss_on_one_rank_ends_backward_on_all(comm: Communicator) -> None:
    x = Tensor(draw(4), requires_grad=True)
    block = scatter_to(comm, reduce_from(comm, copy_to(comm, x)))
    out = gather_from(comm, block, sizes=partition.blocks(4, comm.size))
    if comm.rank == 0:
        out.sum().backward()
        assert x.grad is not None
    else:
        Tensor(np.zeros(())).backward()


def test_a_constant_input_still_takes_part(comm: Communicator) -> None:
    """One rank's input wants no gradient: the all_reduce of the others must not wait for it."""
    x = Tensor(draw(4), requires_grad=comm.rank == 0)
    copy_to(comm, x).sum().backward()
    if comm.rank == 0:
        assert x.grad is not None
        np.testing.assert_array_equal(x.grad, np.full(4, comm.size))


def test_messages_of_each_pair(comm: Communicator) -> None:
    n = 4 * comm.size
    once = int(comm.size > 1)
    for function, forward, backward in (
        (copy_to, {}, {"all_reduce": 1}),
        (reduce_from, {"all_reduce": 1}, {}),
        (scatter_to, {}, {"all_gather": 1}),
        (gather_from, {"all_gather": 1}, {}),
        (all_gather_sequence, {"all_gather": 1}, {"reduce_scatter": 1}),
        (reduce_scatter_sequence, {"reduce_scatter": 1}, {"all_gather": 1}),
    ):
        x = Tensor(draw(2, n), requires_grad=True)
        before = dict(comm.calls)
        out = function(comm, x)
        between = dict(comm.calls)
        out.sum().backward()
        after = dict(comm.calls)
        assert _more(before, between) == {k: v for k, v in forward.items() if once}
        assert _more(between, after) == {k: v for k, v in backward.items() if once}


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    rise = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in rise.items() if count}


def test_arrays_pass_without_the_tape(comm: Communicator) -> None:
    x = draw(2, 4 * comm.size)
    assert type(copy_to(comm, x)) is np.ndarray
    np.testing.assert_allclose(reduce_from(comm, x), x * comm.size)
    np.testing.assert_array_equal(gather_from(comm, scatter_to(comm, x)), x)


def test_sizes_that_do_not_fit(comm: Communicator) -> None:
    if comm.size == 1:
        return
    with pytest.raises(ConfigError, match="sizes"):
        gather_from(comm, draw(2, 3), sizes=(4,) * comm.size)
    with pytest.raises(ConfigError, match="sizes"):
        all_gather_sequence(comm, draw(2, 3), sizes=(3,))
