"""Tensor: construction, dtypes, operators beside NumPy, DLPack, 16-bit numbers."""

import ml_dtypes
import numpy as np
import pytest

import mpipar as mp
from mpipar.autograd import Tensor
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, DtypeMismatchError, GraphError

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_construction_keeps_an_array() -> None:
    x = np.zeros((2, 3), np.float32)
    t = Tensor(x)
    assert t.data is x
    assert (t.shape, t.ndim, t.size, t.dtype) == ((2, 3), 2, 6, np.float32)
    assert not t.requires_grad
    assert Tensor(t).data is x
    assert Tensor([1.0, 2.0]).dtype == np.float64
    assert t.is_leaf
    assert t.numpy() is x


def test_integers_have_no_gradient() -> None:
    with pytest.raises(DtypeMismatchError, match="int64"):
        Tensor(np.arange(3), requires_grad=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_numbers_keep_the_dtype_of_the_tensor(dtype: str) -> None:
    x = Tensor(np.array([0.5, 2.0], mp.arrays.dtype(dtype)), requires_grad=True)
    made = [
        x + 1, 1 + x, x - 2.5, 2.5 - x, x * 2, 2.0 * x, x / 3, 3 / x, x**2, 2.0**x, -x, abs(x),
        x * np.float64(1.5), np.float64(1.5) * x, F.maximum(x, 1.0), F.minimum(1.0, x),
        F.where([True, False], x, 0.0), F.where([True, False], 0.0, x), F.clip(x, 0, 1),
        x.exp(), x.log(), x.sqrt(), x.tanh(), x.sigmoid(), x.sum(), x.mean(), x.max(), x.var(),
    ]  # fmt: skip
    for y in made:
        assert y.dtype == x.dtype
        x.grad = None
        y.sum().backward()
        assert x.grad.dtype == x.dtype


def test_mixed_dtypes_give_each_its_own_gradient() -> None:
    x = Tensor(np.ones(3, np.float32), True)
    y = Tensor(np.ones(3, np.float64), True)
    z = x * y + x
    assert z.dtype == np.float64
    z.sum().backward()
    assert x.grad.dtype == np.float32
    assert y.grad.dtype == np.float64


def test_numpy_on_the_left_gives_a_tensor() -> None:
    t, a = Tensor([1.0, 2.0], True), np.array([3.0, 4.0])
    for made, expected in (
        (a + t, [4, 6]), (a - t, [2, 2]), (a * t, [3, 8]), (a / t, [3, 2]), (a**t, [3, 16]),
        (a @ t, 11), (np.float32(2) * t, [2, 4]), (np.array(2.0) * t, [2, 4]),
    ):  # fmt: skip
        assert isinstance(made, Tensor)
        assert made.requires_grad
        assert np.allclose(made.data, expected)


def test_comparisons_are_plain_arrays() -> None:
    t = Tensor([1.0, 2.0, 3.0], True)
    for made, expected in (
        (t < 2, [1, 0, 0]), (t <= 2, [1, 1, 0]), (t > t, [0, 0, 0]),
        (np.array([2.0] * 3) <= t, [0, 1, 1]),
        (t == 2, [0, 1, 0]), (t != 2, [1, 0, 1]), (t >= np.array([2.0] * 3), [0, 1, 1]),
    ):  # fmt: skip
        assert type(made) is np.ndarray
        assert made.tolist() == [bool(e) for e in expected]
    assert len({t, t, Tensor([1.0])}) == 2  # hashed by identity


def test_numpy_numbers_and_arrays_on_the_left_compare_too() -> None:
    t = Tensor([1.0, 2.0], True)
    assert (np.array([1.0, 1.0]) < t).tolist() == [False, True]
    assert (np.float64(2) == t).tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda t: np.exp(t), r"numpy\.exp of .*\(2,\): .*Use mp\.functional\.exp or a method"),
        (lambda t: np.absolute(t), r"mp\.functional\.abs "),
        (lambda t: np.sin(t), r"Use mp\.functional or a method of Tensor; or pass tensor\.data"),
        (lambda t: np.add.reduce(t), r"numpy\.add\.reduce"),
        (lambda t: np.multiply(np.ones(2), t, where=[True, False]), r"mp\.functional"),
        (lambda t: np.add(np.ones(2), t, out=np.ones(2)), r"a = a \+ tensor"),
    ],
)
def test_other_functions_of_numpy_say_what_to_call(call, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        call(Tensor([1.0, 2.0]))


def test_an_array_is_not_changed_in_place_by_a_tensor() -> None:
    a = np.ones(2)
    with pytest.raises(DtypeMismatchError, match="in place must be an array"):
        a += Tensor([1.0, 2.0])
    assert a.tolist() == [1.0, 1.0]


def test_to_another_dtype() -> None:
    t = Tensor(np.array([1.5, 2.5]), True)
    assert t.float().dtype == np.float32
    assert t.to("bfloat16").dtype == BF16
    t.to(np.float32).sum().backward()
    assert t.grad.dtype == np.float64
    assert not t.to("int64").requires_grad
    with pytest.raises(DtypeMismatchError, match="dtype='cuda': it must be"):
        t.to("cuda")


def test_conversions() -> None:
    t = Tensor(np.array([[1.5, 2.5]], np.float32))
    assert np.asarray(t) is t.data
    assert np.asarray(t, np.float64).dtype == np.float64
    assert np.array(t, copy=True) is not t.data
    assert float(t[0, 0]) == 1.5
    assert int(t[0, 1]) == 2
    assert bool(t[0, 0])
    assert len(t) == 1
    assert f"{t[0, 0]:.2f}" == "1.50"
    assert t.tolist() == [[1.5, 2.5]]
    assert repr(Tensor([1.0], True)) == "Tensor([1.], requires_grad=True)"
    assert [row.tolist() for row in t] == [[1.5, 2.5]]


def test_dlpack_shares_memory_both_ways() -> None:
    t = Tensor(np.arange(4.0))
    out = np.from_dlpack(t)
    assert np.shares_memory(out, t.data)
    back = mp.from_dlpack(out)
    assert isinstance(back, Tensor)
    assert np.shares_memory(back.data, out)
    assert t.__dlpack_device__() == (1, 0)


def test_detach_shares_data_and_ends_the_graph() -> None:
    x = Tensor([2.0], True)
    y = (x * 3).detach()
    assert not y.requires_grad
    assert y.is_leaf
    (x * y).backward()
    assert x.grad.tolist() == [6.0]


def test_hooks_belong_to_leaves() -> None:
    x = Tensor([2.0], True)
    with pytest.raises(GraphError, match="must be a leaf"):
        (x * 2).register_hook(print)
    with pytest.raises(GraphError, match="must be a leaf"):
        Tensor([1.0]).register_hook(print)


def test_backward_needs_a_gradient_for_many_elements() -> None:
    x = Tensor([2.0, 3.0], True)
    with pytest.raises(GraphError, match="single element"):
        (x * 2).backward()
    with pytest.raises(BufferMismatchError, match=r"\(3,\)"):
        (x * 2).backward(np.ones(3))
    (x * 2).backward(Tensor(np.ones(2, np.float32)))
    assert x.grad.tolist() == [2.0, 2.0]


OPERATIONS = {
    "matmul": (lambda x, y: x @ y.T, lambda x, y: x @ y.T),
    "linear": (lambda x, y: F.linear(x, y), lambda x, y: x @ y.T),
    "div": (F.div, np.divide),
    "tanh": (lambda x, y: (x * y).tanh(), lambda x, y: np.tanh(x * y)),
    "sum": (lambda x, y: x.sum(1), lambda x, y: x.sum(1)),
    "mean": (lambda x, y: (x + y).mean(0), lambda x, y: (x + y).mean(0)),
    "var": (lambda x, y: x.var(1), lambda x, y: x.var(1, ddof=1)),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_sixteen_bit_is_computed_in_float32(name: str, dtype: str) -> None:
    """The error is that of a few roundings of the result, whatever the number of elements."""
    ours, numpy = OPERATIONS[name]
    rng = np.random.default_rng(3)
    dt = mp.arrays.dtype(dtype)
    x, y = ((rng.random((8, 512)) + 0.5).astype(dt) for _ in range(2))
    a, b = Tensor(x, True), Tensor(y, True)
    out = ours(a, b)
    assert out.dtype == dt
    expected = numpy(x.astype(np.float64), y.astype(np.float64))
    eps = float(ml_dtypes.finfo(dt).eps)
    assert np.all(np.abs(out.data.astype(np.float64) - expected) <= 1.6 * eps * np.abs(expected))
    out.backward(np.ones(out.shape, dt))
    assert a.grad.dtype == dt


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_gradient_of_many_rows_does_not_stall(dtype: str) -> None:
    """Added one by one in 16 bits, a sum of ones stops at 256 (bfloat16) or 2048 (float16)."""
    dt = mp.arrays.dtype(dtype)
    x, bias = np.zeros((4096, 2), dt), Tensor(np.zeros(2, dt), True)
    (Tensor(x) + bias).sum(1).sum().backward()
    assert bias.grad.astype(np.float64).tolist() == [4096.0, 4096.0]
    bias.grad = None
    F.linear(Tensor(x), Tensor(np.zeros((2, 2), dt), True), bias).backward(np.ones((4096, 2), dt))
    assert bias.grad.astype(np.float64).tolist() == [4096.0, 4096.0]
    weight = Tensor(np.zeros((3, 1), dt), True)
    F.embedding(np.ones(4096, int), weight).backward(np.ones((4096, 1), dt))
    assert weight.grad.astype(np.float64).ravel().tolist() == [0.0, 4096.0, 0.0]
