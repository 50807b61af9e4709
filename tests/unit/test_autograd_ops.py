"""Every operation: its value against NumPy, its gradient against finite differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from mpipar.autograd import Tensor, gradcheck
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def away(*shape: int) -> np.ndarray:
    """Numbers at least 0.3 from zero, where division, powers and abs are smooth."""
    x = normal(*shape)
    return x + np.copysign(0.3, x)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 0.3


PAIRS = [
    ((3, 4), (3, 4)),
    ((3, 1), (4,)),
    ((), (2, 3)),
    ((1,), (5,)),
    ((2, 1, 3), (7, 1)),
    ((0, 3), (3,)),
]

BINARY = {
    "add": (F.add, np.add, normal, normal),
    "sub": (F.sub, np.subtract, normal, normal),
    "mul": (F.mul, np.multiply, normal, normal),
    "div": (F.div, np.divide, normal, away),
    "pow": (F.pow, np.power, positive, normal),
    "maximum": (F.maximum, np.maximum, normal, normal),
    "minimum": (F.minimum, np.minimum, normal, normal),
}


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands_with_broadcasting(name: str, shapes: tuple) -> None:
    ours, numpy, draw_a, draw_b = BINARY[name]
    a, b = draw_a(*shapes[0]), draw_b(*shapes[1])
    assert np.array_equal(ours(Tensor(a), Tensor(b)).data, numpy(a, b))
    assert gradcheck(ours, (a, b))


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3))
def test_any_broadcast_shapes(shapes: hnp.BroadcastableShapes) -> None:
    one, two = shapes.input_shapes
    a, b = np.ones(one), np.full(two, 2.0)
    x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    out = x * y
    assert out.shape == shapes.result_shape
    out.backward(np.ones(out.shape))
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.shape == one
    assert y.grad.shape == two
    size = out.size
    assert np.allclose(x.grad, 2.0 * size / max(x.size, 1)) or size == 0
    assert np.allclose(y.grad, 1.0 * size / max(y.size, 1)) or size == 0


UNARY = {
    "neg": (F.neg, np.negative, normal),
    "exp": (F.exp, np.exp, normal),
    "log": (F.log, np.log, positive),
    "sqrt": (F.sqrt, np.sqrt, positive),
    "tanh": (F.tanh, np.tanh, normal),
    "sigmoid": (F.sigmoid, lambda x: 1 / (1 + np.exp(-x)), normal),
    "abs": (F.abs, np.abs, away),
    "relu": (F.relu, lambda x: np.maximum(x, 0), away),
    "clip": (lambda x: F.clip(x, -0.5, 0.7), lambda x: np.clip(x, -0.5, 0.7), normal),
    "clip_low": (lambda x: F.clip(x, low=-0.5), lambda x: np.clip(x, -0.5, None), normal),
    "clip_high": (lambda x: x.clip(high=0.5), lambda x: np.clip(x, None, 0.5), normal),
    "power of a number": (lambda x: x**3, lambda x: x**3, normal),
    "power zero": (lambda x: x**0, lambda x: x**0, normal),
    "number to a power": (lambda x: 2.0**x, lambda x: 2.0**x, normal),
    "number less": (lambda x: 1.5 - x, lambda x: 1.5 - x, normal),
    "number over": (lambda x: 1.5 / x, lambda x: 1.5 / x, away),
    "where": (lambda x: F.where([[True], [False], [True]], x, 2.0), None, normal),
    "where below": (lambda x: F.where(np.arange(5) > 2, x, x * x), None, normal),
    "mean": (lambda x: x.mean(), np.mean, normal),
}


@pytest.mark.parametrize("name", UNARY)
def test_one_operand(name: str) -> None:
    ours, numpy, draw = UNARY[name]
    x = draw(3, 5)
    if numpy is not None:
        assert np.allclose(ours(Tensor(x)).data, numpy(x), rtol=1e-14)
    assert gradcheck(ours, x)


def test_sigmoid_does_not_overflow() -> None:
    assert F.sigmoid(Tensor([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_ties_of_two_operands_share_the_gradient() -> None:
    x, y = Tensor([1.0, 2.0], True), Tensor([1.0, 3.0], True)
    F.maximum(x, y).sum().backward()
    assert x.grad.tolist() == [0.5, 0.0]
    assert y.grad.tolist() == [0.5, 1.0]


DIMS = [None, 0, -1, (0, 2), (1,), [0, 1]]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var"])
def test_reductions(name: str, dim: object, keep: bool) -> None:
    x = normal(3, 4, 5)
    axis = tuple(dim) if isinstance(dim, list) else dim
    extra = {"ddof": 1} if name == "var" else {}
    expected = getattr(np, name)(x, axis=axis, keepdims=keep, **extra)
    ours = getattr(F, name)
    assert np.allclose(ours(Tensor(x), dim, keep).data, expected, rtol=1e-14)
    assert getattr(Tensor(x), name)(axis=axis, keepdims=keep).shape == expected.shape
    assert gradcheck(lambda t: ours(t, dim, keep), x)


def test_variance_without_correction() -> None:
    x = normal(6)
    assert np.allclose(F.var(Tensor(x), correction=0).data, x.var())
    assert gradcheck(lambda t: t.var(correction=0), x)


def test_ties_of_a_reduction_share_the_gradient() -> None:
    x = Tensor([[3.0, 1.0, 3.0], [2.0, 2.0, 2.0]], True)
    x.max(dim=1).sum().backward()
    assert np.allclose(x.grad, [[0.5, 0, 0.5], [1 / 3] * 3])


def test_numpy_reductions_find_the_method() -> None:
    x = Tensor(normal(2, 3), True)
    out = np.sum(x)
    assert isinstance(out, Tensor)
    assert out.requires_grad


PRODUCTS = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((3, 4), (2, 4, 5)),
    ((2, 0, 4), (4, 5)),
    ((3, 0), (0, 5)),
]


@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_matmul(shapes: tuple) -> None:
    a, b = normal(*shapes[0]), normal(*shapes[1])
    assert np.allclose((Tensor(a) @ Tensor(b)).data, a @ b, rtol=1e-13)
    assert gradcheck(F.matmul, (a, b))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 0, 4)], ids=str)
def test_linear(shape: tuple, bias: bool) -> None:
    inputs = (normal(*shape), normal(5, 4), *([normal(5)] if bias else []))
    expected = inputs[0] @ inputs[1].T + (inputs[2] if bias else 0)
    assert np.allclose(F.linear(*inputs).data, expected, rtol=1e-13)
    assert gradcheck(F.linear, inputs)


def test_linear_reads_a_leaf_weight_in_backward() -> None:
    """Sharded training drops the full weight after forward and brings it back for backward."""
    w = Tensor(normal(3, 4), True)
    x = Tensor(normal(2, 4), True)
    y = F.linear(x, w)
    full, w.data = w.data, np.empty(0)
    w.data = full
    y.sum().backward()
    assert np.allclose(x.grad, np.ones((2, 3)) @ full)


SHAPES = {
    "reshape": lambda x: x.reshape(4, -1),
    "reshape tuple": lambda x: F.reshape(x, (2, 12)),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute back": lambda x: F.permute(x, (-1, 0, 1)),
    "transpose": lambda x: x.transpose(0, 2),
    "transpose last": lambda x: x.transpose(),
    "T": lambda x: x.T,
    "view": lambda x: x.view(6, 4),
    "squeeze": lambda x: (x[:, :1] * 2).squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1) * x[:, :2].unsqueeze(-3).reshape(2, 2, 1, 4),
    "broadcast": lambda x: x[:, :1].broadcast_to((5, 2, 3, 4)),
    "number": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "step": lambda x: x[..., ::-2],
    "new dimension": lambda x: x[:, None, 2],
    "mask": lambda x: x[np.arange(24).reshape(2, 3, 4) % 3 == 0],
    "integers": lambda x: x[:, [0, 2, 2, 0]],
    "two arrays": lambda x: x[np.array([0, 1, 1]), Tensor([2, 0, 0])],
    "array and slice": lambda x: x[[1, 1], :, 1:],
    "cat": lambda x: F.cat([x, x * 2, x[:, :1]], dim=1),
    "cat of one": lambda x: F.cat([x]),
    "cat last": lambda x: F.cat([x, x], dim=-1),
    "stack": lambda x: F.stack([x, x * 3], dim=1),
    "stack of one": lambda x: F.stack([x], dim=-1),
    "split": lambda x: F.split(x, [1, 0, 2], dim=1),
    "split by size": lambda x: x.split(3, dim=-1),
    "split and use one": lambda x: F.split(x, 2, dim=2)[1] * 2,
    "iterate": lambda x: tuple(x),
    "astype": lambda x: x.astype("float64") * 2,
}


@pytest.mark.parametrize("name", SHAPES)
def test_moving_elements(name: str) -> None:
    assert gradcheck(SHAPES[name], normal(2, 3, 4))


def test_values_of_moved_elements() -> None:
    x = normal(2, 3, 4)
    t = Tensor(x)
    assert np.array_equal(t.permute(2, 0, 1).data, x.transpose(2, 0, 1))
    assert np.array_equal(t[:, [0, 2]].data, x[:, [0, 2]])
    assert [p.shape for p in t.split(3, dim=-1)] == [(2, 3, 3), (2, 3, 1)]
    assert np.array_equal(F.stack([t, t], 1).data, np.stack([x, x], 1))
    assert [t.unsqueeze(d).shape for d in (0, 3, -1, -4)] == [
        (1, 2, 3, 4), (2, 3, 4, 1), (2, 3, 4, 1), (1, 2, 3, 4),
    ]  # fmt: skip
    ones = Tensor(normal(1, 3, 1))
    assert [ones.squeeze(d).shape for d in (None, 0, -1, 1, (0, 2))] == [
        (3,), (3, 1), (1, 3), (1, 3, 1), (3,),
    ]  # fmt: skip


def test_argmax_gives_places() -> None:
    x = normal(3, 5)
    t = Tensor(x, True)
    assert np.array_equal(t.argmax(-1), x.argmax(1))
    assert t.argmax(0, keepdim=True).shape == (1, 5)
    assert t.argmax().item() == x.argmax() == np.argmax(t)
    assert type(t.argmax()) is type(t.argmax(1)) is np.ndarray
    assert F.argmax(np.array([1, 3, 3])) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mse_loss(reduction: str) -> None:
    x, y = normal(3, 4), normal(3, 4)
    squares = (x - y) ** 2
    expected = {"mean": squares.mean(), "sum": squares.sum(), "none": squares}[reduction]
    assert np.allclose(F.mse_loss(Tensor(x), y, reduction).data, expected, rtol=1e-14)
    assert gradcheck(lambda a, b: F.mse_loss(a, b, reduction), (x, y))


def test_mse_loss_of_16_bits_of_nothing_and_by_an_unknown_reduction() -> None:
    x = Tensor(np.full(4096, 0.5, np.float16), True)
    loss = F.mse_loss(x, np.zeros(4096, np.float16), "sum")
    assert (loss.dtype, loss.item()) == (np.float32, 1024.0)
    loss.backward()
    assert (x.grad == np.float16(1)).all()
    assert np.isnan(F.mse_loss(np.zeros(0), np.zeros(0)).item())
    with pytest.raises(ConfigError, match="reduction='avg': it must be"):
        F.mse_loss(x, x, "avg")


MISFITS = {
    "add": lambda: Tensor(normal(3)) + normal(4),
    "where": lambda: F.where(True, normal(3), normal(4)),
    "matmul": lambda: Tensor(normal(2, 3)) @ normal(4, 2),
    "linear": lambda: F.linear(normal(2, 3), normal(4, 2)),
    "linear bias": lambda: F.linear(normal(2, 3), normal(4, 3), normal(3)),
    "reshape": lambda: Tensor(normal(2, 3)).reshape(4, 2),
    "view": lambda: Tensor(normal(2, 3)).view(5),
    "squeeze": lambda: Tensor(normal(2, 3)).squeeze(2),
    "unsqueeze": lambda: Tensor(normal(2, 3)).unsqueeze(3),
    "argmax": lambda: Tensor(normal(2, 3)).argmax(2),
    "permute": lambda: Tensor(normal(2, 3)).permute(0, 0),
    "transpose": lambda: Tensor(normal(2, 3)).transpose(0, 5),
    "broadcast": lambda: Tensor(normal(2, 3)).broadcast_to((2, 4)),
    "cat": lambda: F.cat([normal(2, 3), normal(2, 4)]),
    "stack": lambda: F.stack([normal(2, 3), normal(2, 4)]),
    "split": lambda: F.split(normal(2, 3), [1, 1], dim=1),
    "sum": lambda: F.sum(normal(2, 3), 2),
    "sum twice": lambda: F.sum(normal(2, 3), (1, -1)),
    "swiglu": lambda: F.swiglu(normal(2, 3), normal(3, 3)),
    "layer_norm": lambda: F.layer_norm(normal(2, 3), normal(2), normal(3)),
    "rms_norm": lambda: F.rms_norm(normal(2, 3), normal(2)),
    "rotary": lambda: F.rotary(normal(2, 3, 1, 4), np.arange(4)),
    "rotary odd": lambda: F.rotary(normal(2, 3, 1, 5), np.arange(3)),
    "attention": lambda: F.attention(normal(2, 3, 1, 4), normal(2, 3, 1, 5), normal(2, 3, 1, 5)),
    "cross_entropy": lambda: F.cross_entropy(normal(2, 3), np.array([1, 2, 0])),
    "mse_loss": lambda: F.mse_loss(normal(4), normal(4, 1)),
    "backward": lambda: Tensor(normal(3), True).backward(normal(4)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit_are_named(name: str) -> None:
    with pytest.raises(BufferMismatchError, match=r"\(?\d"):
        MISFITS[name]()


def test_the_message_names_both_shapes() -> None:
    with pytest.raises(BufferMismatchError, match=r"\(2, 3\).*\(4, 2\)"):
        Tensor(normal(2, 3)) @ normal(4, 2)
