"""What is easily got wrong: repeated indices, bounds that are arrays, complex numbers, sizes."""

import threading

import numpy as np
import pytest

import mpipar as mp
from mpipar import functional as F
from mpipar import rng
from mpipar.errors import BufferMismatchError, DtypeMismatchError


def leaf(*shape: int) -> mp.Tensor:
    """Return 1, 2, 3, ... in float64."""
    return mp.Tensor(np.arange(1.0, 1 + np.prod(shape)).reshape(shape), requires_grad=True)


@pytest.mark.parametrize("where", [((0, 0), slice(None)), (((0, 0), (1, 1)),), ([0, 0],)])
def test_sequences_inside_an_index_may_name_an_element_twice(where) -> None:
    x = leaf(2, 3)
    y = x[where]
    np.testing.assert_array_equal(y.data, x.data[where])
    y.sum().backward()
    expected = np.zeros((2, 3))
    np.add.at(expected, where, 1.0)
    np.testing.assert_array_equal(x.grad, expected)
    assert x[[]].shape == (0, 3)


def test_bounds_of_clip_broadcast_and_have_gradients() -> None:
    x, low = mp.Tensor([1.0], requires_grad=True), leaf(3)
    y = x.clip(low, np.array([5.0, 5.0, 2.5]))
    np.testing.assert_array_equal(y.data, [1.0, 2.0, 2.5])
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [1.0])
    np.testing.assert_array_equal(low.grad, [0.0, 1.0, 0.0])


def test_a_condition_larger_than_the_operands_of_where() -> None:
    x = mp.Tensor([1.0], requires_grad=True)
    F.where(np.array([True, False, True]), x, 0.0).sum().backward()
    np.testing.assert_array_equal(x.grad, [2.0])


def test_integers_and_complex_numbers_want_no_gradient() -> None:
    whole = mp.Tensor([1, 2])
    with pytest.raises(DtypeMismatchError, match="floating-point"):
        whole.requires_grad = True
    assert not leaf(2).astype("int64").requires_grad
    calls = [
        lambda: leaf(2) * 1j,
        lambda: leaf(2) @ np.array([1j, 1.0]),
        lambda: leaf(2).astype("complex64"),
        lambda: mp.Tensor([1j]),
        lambda: leaf(2).sum().backward(np.array(1j)),
    ]
    for call in calls:
        with pytest.raises(DtypeMismatchError, match=r"real|complex"):
            call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: x.split([4, -1]), "none negative"),
        (lambda x: x.split(0), "at least 1"),
        (lambda x: x.split(1, dim=5), "dim=5"),
        (lambda x: x.split(None), "sizes"),
        (lambda x: F.softmax(x, (0, 0)), "dim"),
        (lambda x: x @ "a", "real numbers"),
        (lambda x: x.clip("a"), "real numbers"),
        (lambda x: mp.Tensor(None), "real numbers"),
        (lambda x: x.transpose("a", 0), "dims"),
        (lambda x: x.reshape("a"), "shape"),
        (lambda x: x.permute("a"), "dims"),
        (lambda x: x.sum(1.5), "dim=1.5"),
        (lambda x: x[:1].var(), "correction"),
        (lambda x: x[:0].max(), "extreme"),
        (lambda x: x[:0].argmax(), "extreme"),
        (lambda x: mp.Tensor([1, 2]) ** -1, "floating-point"),
    ],
)
def test_what_cannot_be_is_named(call, text: str) -> None:
    with pytest.raises((BufferMismatchError, DtypeMismatchError), match=text):
        call(leaf(3))


def test_numbers_of_numpy_are_sizes() -> None:
    assert leaf(2, 3).reshape(np.int64(6)).shape == (6,)
    assert [y.shape for y in leaf(3).split(np.int64(2))] == [(2,), (1,)]


def test_a_negative_base_gives_the_exponent_no_number() -> None:
    x = mp.Tensor([2.0], requires_grad=True)
    ((-2.0) ** x).backward()
    assert np.isnan(x.grad).all()


def test_threads_build_graphs_of_their_own() -> None:
    found: list[object] = []

    def work(number: int) -> None:
        for _ in range(200):
            x = mp.Tensor([float(number)], requires_grad=True)
            with mp.no_grad():
                hidden = x * x
            (x * x * x).sum().backward()
            found.append((hidden.requires_grad, float(x.grad[0]) == 3.0 * number**2))

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    with mp.no_grad(), rng.at(7, 0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not mp.is_grad_enabled()
    assert found == [(False, True)] * 600


def test_a_decorated_function_may_run_in_two_threads_at_once() -> None:
    inside, leave = threading.Event(), threading.Event()
    seen: list[bool] = []

    @mp.no_grad()
    def wait(first: bool) -> None:
        if first:
            inside.set()
            leave.wait(10)

    def work() -> None:
        wait(True)
        seen.append(mp.is_grad_enabled())

    thread = threading.Thread(target=work)
    with mp.no_grad():
        thread.start()
        inside.wait(10)
        wait(False)
        leave.set()
        thread.join()
        assert not mp.is_grad_enabled()
    assert seen == [True]


def test_a_thread_has_its_own_position() -> None:
    seen: list[rng.Position] = []
    with rng.at(7, 3):
        thread = threading.Thread(target=lambda: seen.append(rng.position()))
        thread.start()
        thread.join()
        assert rng.position() == rng.Position(7, 3)
    assert seen == [rng.Position()]
