"""The tape: accumulation, memory, hooks, pumps, no_grad."""

import gc
import weakref

import numpy as np
import pytest

import mpipar as mp
from mpipar.autograd import Function, Tensor, gradcheck, no_grad
from mpipar.autograd import functional as F
from mpipar.autograd.tape import state
from mpipar.errors import GraphError


@pytest.fixture(autouse=True)
def _empty_tape():
    yield
    assert state.enabled
    assert not state.pumps
    state.tape.clear()


def test_gradients_accumulate_in_place() -> None:
    x = Tensor([1.0, 2.0], True)
    bucket = np.zeros(4)
    x.grad = bucket[1:3]
    (x * 3).sum().backward()
    (x * 4).sum().backward()
    assert bucket.tolist() == [0, 7, 7, 0]
    assert x.grad.base is bucket


@pytest.mark.parametrize("out", [3, 700])
def test_a_weight_gradient_is_added_to_the_one_there(out: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, 4))
    w = Tensor(np.zeros((out, 4)), True)
    w.grad = bucket = np.ones((out, 4))
    fired = []
    w.register_hook(lambda t: fired.append(t.grad.copy()))
    F.linear(x, w).sum().backward()
    assert w.grad is bucket
    assert np.allclose(bucket, 1 + x.sum(0))
    assert len(fired) == 1
    assert np.array_equal(fired[0], bucket)


def test_a_new_gradient_is_contiguous_and_nobody_elses() -> None:
    x = Tensor(np.ones((2, 3)), True)
    seed = np.arange(6.0).reshape(3, 2)
    x.T.backward(seed)
    assert x.grad.flags.c_contiguous
    assert not np.shares_memory(x.grad, seed)
    y = Tensor(np.ones(3), True)
    z = Tensor(np.ones(3), True)
    (y + z).backward(np.ones(3))
    assert not np.shares_memory(y.grad, z.grad)


def test_values_used_twice_do_not_disturb_each_other() -> None:
    """In-place sums never write into an array that another consumer still reads."""
    rng_ = np.random.default_rng(0)

    def f(x, y):
        a = x + y  # both get the same gradient array
        b = a.reshape(-1)  # a view of it
        c = a * a
        d = (b + b).reshape(a.shape) + c
        e = F.cat([d, a, d], 0)
        first, second, third = F.split(e, a.shape[0], 0)
        return first * second + third + a, b

    assert gradcheck(f, (rng_.standard_normal((2, 3)), rng_.standard_normal((2, 3))))


def test_the_seed_is_not_written_to() -> None:
    seed = np.ones(3)
    x = Tensor(np.ones(3), True)
    y = x * 1.0
    mp.backward(y, y + y, grads=(seed, np.ones(3)))
    assert seed.tolist() == [1.0] * 3
    assert x.grad.tolist() == [3.0] * 3


def test_several_losses_at_once() -> None:
    x = Tensor([3.0], True)
    h = x * x
    mp.backward(h * 2, h * h)
    assert x.grad.tolist() == [12.0 + 108.0]


def test_a_second_backward_is_an_error_with_the_fix() -> None:
    x = Tensor([3.0], True)
    h = x * x
    first, second = h * 2, h * 3
    first.backward()
    before = x.grad.copy()
    with pytest.raises(GraphError, match=r"mpipar\.backward"):
        second.backward()
    assert np.array_equal(x.grad, before)


def test_a_leaf_is_its_own_graph() -> None:
    x = Tensor([3.0], True)
    fired = []
    x.register_hook(lambda t: fired.append(t.grad.copy()))
    x.backward()
    assert x.grad.tolist() == [1.0]
    assert len(fired) == 1


def test_long_chains_need_no_recursion() -> None:
    x = Tensor(np.ones(1), True)
    y = x
    for _ in range(10_000):
        y = y + 1.0
    y.backward()
    assert x.grad.tolist() == [1.0]
    for _ in range(100_000):
        y = y.detach() if y.is_leaf and y is not x else y
        y = (x if y.is_leaf else y) * 1.0
    del y  # freed without a backward


def test_backward_frees_what_it_has_consumed() -> None:
    alive: list[int] = []
    arrays: list[weakref.ref] = []

    class Watch(Function):
        @staticmethod
        def forward(ctx, x):
            out = x * 1.0
            ctx.save_for_backward(out)
            arrays.append(weakref.ref(out))
            return out

        @staticmethod
        def backward(ctx, grad):
            alive.append(sum(ref() is not None for ref in arrays))
            return grad

    gc.disable()
    try:
        y = Tensor(np.ones(1000), True)
        for _ in range(4):
            y = Watch.apply(y)
        loss = y.sum()
        del y
        loss.backward()
        assert alive == [4, 3, 2, 1]
        assert all(ref() is None for ref in arrays)
    finally:
        gc.enable()


def test_a_dead_graph_is_freed_without_the_collector() -> None:
    gc.disable()
    try:
        x = Tensor(np.ones(3), True)
        y = (x * 2).exp()
        data = weakref.ref(y.data)
        node = weakref.ref(y.node)
        del y
        assert data() is None
        assert node() is None
    finally:
        gc.enable()


def test_operations_keep_only_what_backward_needs() -> None:
    x = Tensor(np.ones(3), True)
    constant = np.full(3, 2.0)
    y = x * 2.0
    kept = weakref.ref(y.data)
    z = y * constant  # the gradient of y needs the constant only
    del y
    assert kept() is None
    z.sum().backward()
    assert x.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("product", [F.matmul, F.linear])
def test_a_product_with_a_constant_does_not_keep_the_other(product) -> None:
    y = Tensor(np.ones((3, 3)), True) * 2.0
    kept = weakref.ref(y.data)
    z = product(y, np.ones((3, 3)))
    del y
    assert kept() is None
    assert z.requires_grad


def test_no_grad() -> None:
    x = Tensor([1.0], True)
    with no_grad():
        assert not mp.is_grad_enabled()
        assert not (x * 2).requires_grad
        with mp.autograd.enable_grad():
            assert (x * 2).requires_grad
    assert mp.is_grad_enabled()

    @no_grad()
    def twice(t):
        return t * 2

    assert not twice(twice(x)).requires_grad
    with pytest.raises(ValueError, match="inside"), no_grad():
        raise ValueError("inside")
    assert mp.is_grad_enabled()


def test_a_hook_fires_once_after_the_last_use() -> None:
    w, other = Tensor(np.ones((2, 2)), True), Tensor(np.ones((2, 2)), True)
    fired: list[np.ndarray] = []
    handle = w.register_hook(lambda t: fired.append(t.grad.copy()))
    other.register_hook(lambda t: fired.append("never"))
    y = Tensor(np.ones((2, 2))) @ w
    y = ((y @ w) * w).sum() + w.sum() * 2
    y.backward()
    assert len(fired) == 1
    assert np.array_equal(fired[0], w.grad)
    handle.remove()
    handle.remove()
    (w * 2).sum().backward()
    assert len(fired) == 1


def test_a_hook_fires_as_early_as_it_can() -> None:
    order: list[str] = []
    early, late = Tensor([2.0], True), Tensor([3.0], True)
    early.register_hook(lambda t: order.append("late layer"))
    late.register_hook(lambda t: order.append("early layer"))

    class Mark(Function):
        @staticmethod
        def forward(ctx, x):
            return x.copy()

        @staticmethod
        def backward(ctx, grad):
            order.append("between")
            return grad

    (Mark.apply(Tensor([1.0]) * late) * early).backward()
    assert order == ["late layer", "between", "early layer"]


def test_pumps_run_between_nodes() -> None:
    calls: list[int] = []
    handle = mp.add_pump(lambda: calls.append(1))
    x = Tensor([1.0], True)
    y = x
    for _ in range(5):
        y = y * 2.0
    y.backward()
    handle.remove()
    assert len(calls) == 5
    (x * 2).backward()
    assert len(calls) == 5
