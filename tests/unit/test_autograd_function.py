"""Function, collectives on the tape, recompute and gradcheck."""

import weakref

import numpy as np
import pytest

import mpipar as mp
from mpipar import rng
from mpipar.autograd import Function, Tape, Tensor, gradcheck, no_grad, recompute, tape
from mpipar.autograd import functional as F
from mpipar.autograd.tape import state
from mpipar.errors import GraphError


@pytest.fixture(autouse=True)
def _empty_tape():
    yield
    assert state.enabled
    assert not state.pumps
    state.tape.clear()


ran: list[tuple[str, list[float]]] = []


class Share(Function):
    """A stand-in for a collective: notes that its backward ran, and with what."""

    collective = True

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ran.append((ctx.name, grad.tolist()))
        return grad, None


@pytest.fixture
def log():
    ran.clear()
    return ran


def test_every_collective_runs_in_reverse_order(log) -> None:
    x = Tensor([1.0], True)
    a = Share.apply(x * 2, "a")
    Share.apply(a, "unused")
    b = Share.apply(Tensor([5.0]), "constant input")
    loss = a * 3
    Share.apply(loss, "later")
    assert b.requires_grad
    loss.backward()
    assert log == [("constant input", [0.0]), ("unused", [0.0]), ("a", [3.0])]
    assert x.grad.tolist() == [6.0]
    Tensor(0.0).backward()  # the one recorded after the loss
    assert log[3:] == [("later", [0.0])]


def test_a_rank_without_a_loss_runs_all_collectives(log) -> None:
    x = Tensor([1.0], True)
    Share.apply(Share.apply(x * 2, "a"), "b")
    Tensor(0.0).backward()
    assert log == [("b", [0.0]), ("a", [0.0])]
    assert x.grad.tolist() == [0.0]
    Tensor(0.0).backward()
    mp.backward()
    assert len(log) == 2


def test_collectives_are_not_recorded_without_gradients(log) -> None:
    with no_grad():
        assert not Share.apply(Tensor([1.0], True), "a").requires_grad
    assert not Share.apply(Tensor([1]), "integers").requires_grad or True
    Tensor(0.0).backward()
    assert [name for name, _ in log] == ["integers"]


def test_very_many_pending_collectives_are_warned_of_once(log, monkeypatch) -> None:
    monkeypatch.setattr(tape, "MANY", 3)
    monkeypatch.setattr(state, "warned", False)
    x = Tensor([1.0], True)
    for _ in range(2):
        for _ in range(3):
            Share.apply(x, "trained")
        Tensor(0.0).backward()  # never more than the limit at a time
    with no_grad():
        for _ in range(9):
            Share.apply(x, "evaluated under no_grad")
    for _ in range(3):
        Share.apply(x, "evaluated")
    with pytest.warns(tape.PendingCollectivesWarning, match=r"under mp\.no_grad\(\)") as caught:
        Share.apply(x, "evaluated")
    assert [warning.filename for warning in caught] == [__file__]  # the line to look at
    Share.apply(x, "evaluated")  # once: warnings are errors here


def test_a_consumed_collective_is_an_error(log) -> None:
    x = Tensor([1.0], True)
    first = Share.apply(x, "a") * 2
    second = Share.apply(x, "b") * 2
    second.backward()
    assert [name for name, _ in log] == ["b", "a"]
    with pytest.raises(GraphError, match="consumed"):
        first.backward()


def test_a_tape_of_its_own(log) -> None:
    x = Tensor([1.0], True)
    outer = Share.apply(x, "outer") * 2
    with Tape():
        inner = Share.apply(x, "inner") * 3
        inner.backward()
    assert [name for name, _ in log] == ["inner"]
    outer.backward()
    assert [name for name, _ in log] == ["inner", "outer"]
    assert x.grad.tolist() == [5.0]


def test_an_error_in_backward_leaves_no_collectives_behind(log) -> None:
    class Broken(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("broken")

    x = Tensor([1.0], True)
    with pytest.raises(RuntimeError, match="broken"):
        Broken.apply(Share.apply(x, "a")).backward()
    assert mp.is_grad_enabled()
    Tensor(0.0).backward()
    assert log == []


class Both(Function):
    """Two outputs, three arguments of which one is no Tensor."""

    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * factor, x * y

    @staticmethod
    def backward(ctx, one, two):
        x, y = ctx.saved_tensors
        assert ctx.saved_tensors is ctx.saved
        assert one.shape == two.shape == x.shape
        dx = one * ctx.factor + two * y if ctx.needs_input_grad[0] else None
        return dx, None, two * x


def test_function_with_two_outputs() -> None:
    rng_ = np.random.default_rng(1)
    x, y = rng_.standard_normal(3), rng_.standard_normal(3)
    assert gradcheck(lambda x, y: Both.apply(x, 3.0, y), (x, y))
    assert gradcheck(lambda x, y: Both.apply(x, 3.0, y)[1], (x, y))  # zeros for the other
    a = Tensor(x)
    one, _ = Both.apply(a, 3.0, Tensor(y, True))
    assert one.requires_grad
    assert not Both.apply(a, 3.0, y)[0].requires_grad


class Wrong(Function):
    """Returns what the test tells it to."""

    @staticmethod
    def forward(ctx, x, y, result=None):
        ctx.result = result
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return ctx.result


@pytest.mark.parametrize(
    ("result", "match"), [((np.ones(3),), "1 results"), ((np.ones(2), None), r"\(2,\)")]
)
def test_function_results_are_checked(result: tuple, match: str) -> None:
    x = Tensor(np.ones(3), True)
    with pytest.raises(GraphError, match=match):
        Wrong.apply(x, x, result=result).sum().backward()


def test_function_keyword_tensors_have_no_gradient() -> None:
    x = Tensor(np.ones(3), True)
    with pytest.raises(GraphError, match="positional"):
        Wrong.apply(x, x, result=x)


def test_what_a_function_returns_is_never_written_to() -> None:
    held = np.ones(2)

    class Held(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            return held

    x = Tensor(np.ones(2), True)
    h = x * 1.0
    (Held.apply(h) + Held.apply(h) + h).sum().backward()
    assert held.tolist() == [1.0, 1.0]
    assert x.grad.tolist() == [3.0, 3.0]


def block(x: Tensor, w: Tensor) -> Tensor:
    keep = rng.key(1, "block", rng.position().step)
    return F.dropout(F.gelu(F.linear(x, w)), 0.3, keep)


@pytest.mark.parametrize("nested", [False, True])
def test_recompute_equals_plain(nested: bool) -> None:
    rng_ = np.random.default_rng(2)
    x, w = Tensor(rng_.standard_normal((5, 4)), True), Tensor(rng_.standard_normal((4, 4)), True)
    fired: list[np.ndarray] = []
    w.register_hook(lambda t: fired.append(t.grad.copy()))

    def part(t):
        return block(t, w)

    def model(again):
        """Three blocks; `again` calls a part plainly, or recomputes it."""
        y = x * 1.0
        for _ in range(3):
            y = recompute(lambda t: again(part, again(part, t)), y) if nested else again(part, y)
        return (y @ w).sum()

    results = []
    for again in (lambda f, t: f(t), recompute):
        x.grad = w.grad = None
        fired.clear()
        with rng.at(7, 0):
            loss = model(again)
        loss.backward()  # elsewhere: the position is restored
        assert len(fired) == 1
        assert np.array_equal(fired[0], w.grad)
        results.append((loss.item(), x.grad, w.grad))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])
    assert np.allclose(results[0][2], results[1][2], rtol=1e-14)


def test_recompute_keeps_only_its_inputs() -> None:
    seen: list[weakref.ref] = []

    def f(t):
        h = t * 2.0
        seen.append(weakref.ref(h.data))
        return h.exp().sum()

    y = recompute(f, Tensor(np.zeros(3), True))
    assert seen[0]() is None
    y.backward()
    assert len(seen) == 2
    with no_grad():
        assert not recompute(f, Tensor(np.zeros(3), True)).requires_grad


def test_recompute_with_collectives_is_one(log) -> None:
    x = Tensor([1.0], True)
    recompute(lambda t: Share.apply(Share.apply(t, "a") * 2, "b"), x)
    Tensor(0.0).backward()
    assert log == [("b", [0.0]), ("a", [0.0])]
    log.clear()
    (recompute(lambda t: Share.apply(t * 2, "c"), x) * 3).backward()
    assert log == [("c", [3.0])]
    assert x.grad.tolist() == [6.0]


def test_recompute_of_several_outputs_and_constants() -> None:
    x = Tensor(np.ones(2), True)
    one, two = recompute(lambda t, k: (t * k, t.sum() * 2), x, 3.0)
    assert one.tolist() == [3.0, 3.0]
    two.backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert not recompute(lambda t: t * 2, Tensor([1.0])).requires_grad
    with pytest.raises(GraphError, match="Tensor"):
        recompute(lambda t: t.data, x)


def test_gradcheck_finds_a_wrong_gradient() -> None:
    x = np.linspace(0.1, 1, 5)
    with pytest.raises(GraphError, match=r"input 1 of shape \(5,\)"):
        gradcheck(lambda a, b: a + Tensor(np.sin(b.data)), (x, x))
    assert gradcheck(lambda a, ids: F.embedding(ids, a), (np.ones((4, 2)), np.array([1, 3])))
    assert gradcheck(lambda a: a * 2, Tensor(x.astype(np.float32)))
    with no_grad():
        assert gradcheck(F.exp, x)
    summed: list[float] = []
    assert gradcheck(F.exp, x, total=lambda value: summed.append(value) or value)
    assert np.isclose(*summed)
