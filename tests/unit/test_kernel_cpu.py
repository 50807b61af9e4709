"""Each CPU kernel against its float64 reference, and its backward against finite differences."""

import math

import ml_dtypes
import numpy as np
import pytest

from mpipar import arrays, rng
from mpipar.autograd import Tensor, gradcheck
from mpipar.autograd import functional as F
from mpipar.errors import BufferMismatchError, ConfigError
from mpipar.kernels import (
    adamw,
    blocks,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    sgd,
    silu,
    softmax,
)

RNG = np.random.default_rng(11)
DTYPES = ["float64", "float32", "float16", "bfloat16"]
SHAPES = [(3, 7), (1, 1), (5, 4, 65), (700, 130), (0, 4), (130,)]


def normal(*shape: int, dtype: str = "float64") -> np.ndarray:
    return RNG.standard_normal(shape).astype(arrays.dtype(dtype))


def close(got: np.ndarray, expected: np.ndarray, k: float = 8, atol: float | None = None) -> None:
    """Assert |got - expected| <= atol + k * eps(dtype) * |expected|."""
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    error = np.abs(got.astype(np.float64) - expected)
    limit = (4 * eps if atol is None else atol) + k * eps * np.abs(expected)
    assert got.shape == expected.shape
    assert np.all(error <= limit), (error - limit).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_softmax(shape: tuple, dtype: str, log: bool) -> None:
    x = normal(*shape, dtype=dtype)
    y = softmax.forward(x, log)
    assert y.dtype == x.dtype
    if x.size:
        close(y, softmax.reference(x, log))


def test_softmax_of_large_numbers() -> None:
    y = softmax.forward(np.array([[1e4, -1e4, 1e4]], np.float32))
    assert y.tolist() == [[0.5, 0.0, 0.5]]
    assert np.isfinite(softmax.forward(np.array([[1e4, -1e4]], np.float32), log=True)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape: tuple, dtype: str) -> None:
    x = normal(*shape, dtype=dtype)
    w, b = normal(shape[-1], dtype=dtype), normal(shape[-1], dtype=dtype)
    eps = 1e-3 if shape == (1, 1) else 1e-5
    y, _ = layer_norm.forward(x, w, b, eps)
    z, _ = rms_norm.forward(x, w, eps)
    assert y.dtype == z.dtype == x.dtype
    if x.size:
        close(y, layer_norm.reference(x, w, b, eps), 16, 4e-6 if dtype == "float32" else None)
        close(z, rms_norm.reference(x, w, eps), 16)


def test_layer_norm_far_from_zero() -> None:
    """The variance is that of the differences from the mean, not a difference of squares."""
    x = (normal(4, 64) + 1e3).astype(np.float32)
    y, _ = layer_norm.forward(x, np.ones(64, np.float32), np.zeros(64, np.float32))
    expected = layer_norm.reference(x, np.ones(64), np.zeros(64), 1e-5)
    assert np.abs(y - expected).max() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu(shape: tuple, approximate: str, dtype: str) -> None:
    x = 3 * normal(*shape, dtype=dtype)
    y = gelu.forward(x, approximate)
    slope = gelu.backward(np.ones_like(x), x, approximate)
    assert y.dtype == slope.dtype == x.dtype
    if x.size:
        eps = float(ml_dtypes.finfo(x.dtype).eps)
        close(y, gelu.reference(x, approximate), atol=8 * eps)
        h = 1e-5
        wide = x.astype(np.float64)
        ends = [gelu.reference(wide + s, approximate) for s in (h, -h)]
        close(slope, (ends[0] - ends[1]) / (2 * h), atol=1e-9 + 16 * eps)


def test_error_function() -> None:
    x = np.concatenate([np.linspace(-8, 8, 4001), [0.0, 1e-300, 30.0, -1e300]])
    expected = np.array([math.erf(v) for v in x.tolist()])
    assert np.abs(gelu.erf(x) - expected).max() < 1e-14


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_swiglu(shape: tuple, dtype: str) -> None:
    x, up = 3 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    y = silu.forward(x)
    z = silu.swiglu(x, up)
    assert y.dtype == z.dtype == x.dtype
    close(y, silu.reference(x))
    close(z, silu.reference(x, up), atol=16 * float(ml_dtypes.finfo(x.dtype).eps))
    gate, other = np.split(np.concatenate([x, up], -1), 2, -1)  # halves of one array
    assert np.array_equal(silu.swiglu(gate, other), z)
    for half, whole in zip(
        silu.swiglu_backward(y, gate, other), silu.swiglu_backward(y, x, up), strict=True
    ):
        assert np.array_equal(half, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 8), (1, 300, 2, 64), (2, 1, 1, 2), (1, 0, 2, 4)], ids=str
)
def test_rotary(shape: tuple, dtype: str) -> None:
    x = normal(*shape, dtype=dtype)
    places = np.arange(shape[1]) + 17
    for positions in (places, np.stack([places + 1000 * b for b in range(shape[0])])):
        cos, sin = rotary.table(positions, shape[3], 10000.0, arrays.compute_dtype(x.dtype))
        y = rotary.rotate(x, cos, sin)
        assert y.dtype == x.dtype
        close(y, rotary.reference(x, positions))
        close(rotary.rotate(y, cos, sin, back=True), x.astype(np.float64), atol=8 * 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: str) -> None:
    ids = RNG.integers(0, 10, (7, 5))
    w, g = normal(12, 3, dtype=dtype), normal(7, 5, 3, dtype=dtype)
    assert np.array_equal(embedding.gather(w, ids), w[ids])
    dw = embedding.scatter_add(g, ids, 12)
    assert dw.dtype == g.dtype
    close(dw, embedding.reference(g, ids, 12), atol=16 * float(ml_dtypes.finfo(g.dtype).eps))
    assert not dw[10:].any()
    assert not embedding.scatter_add(g[:0], ids[:0], 12).any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 7), (900, 65), (3, 1), (0, 5)], ids=str)
def test_cross_entropy(shape: tuple, dtype: str, smoothing: float) -> None:
    x = 2 * normal(*shape, dtype=dtype)
    t = RNG.integers(0, shape[1], shape[0])
    t[::3] = -100
    losses, d = cross_entropy.forward(x, t, smoothing, -100, slope=True)
    if not x.size:
        return
    close(losses, cross_entropy.reference(x, t, smoothing))
    g = normal(shape[0])
    one_hot = (t[:, None] == np.arange(shape[1])) * 1.0
    target = (1 - smoothing) * one_hot + smoothing / shape[1]
    expected = (softmax.reference(x) - target) * (g * (t != -100))[:, None]
    close(cross_entropy.backward(g, d, t), expected, 16)


def test_cross_entropy_as_written_out() -> None:
    """Reductions, the share of ignored targets, and smoothing, from the definition."""
    x, t = normal(2, 3, 5), np.array([[1, -7, 4], [0, 2, -7]])
    z = softmax.reference(x, log=True)
    valid = t != -7
    nll = -np.take_along_axis(z, np.where(valid, t, 0)[..., None], -1)[..., 0]
    each = np.where(valid, 0.8 * nll - 0.2 * z.mean(-1), 0)
    for reduction, expected in (("none", each), ("sum", each.sum()), ("mean", each.sum() / 4)):
        ours = F.cross_entropy(Tensor(x), t, reduction, 0.2, -7)
        assert np.allclose(ours.data, expected, rtol=1e-13)
        assert gradcheck(lambda a, r=reduction: F.cross_entropy(a, t, r, 0.2, -7), x)
    all_ignored = F.cross_entropy(Tensor(x, True), np.full((2, 3), -100))
    assert np.isnan(all_ignored.item())
    all_ignored.backward()


def test_arguments_are_checked() -> None:
    x = normal(2, 5)
    for call, match in (
        (lambda: F.cross_entropy(x, np.array([1, 5])), r"targets\[1\]=5"),
        (lambda: F.cross_entropy(x, np.array([-1, 0])), r"targets\[0\]=-1"),
        (lambda: F.cross_entropy(x, np.array([1, 0]), "avg"), "reduction='avg'"),
        (lambda: F.cross_entropy(x, np.array([1, 0]), label_smoothing=2), "label_smoothing=2"),
        (lambda: F.embedding(np.array([0, 9]), x), r"ids\[1\]=9"),
        (lambda: F.embedding(np.array([-1]), x), r"ids\[0\]=-1"),
        (lambda: F.dropout(x, 1.0, 3), r"p=1\.0"),
        (lambda: F.gelu(x, "sigmoid"), "approximate='sigmoid'"),
        (lambda: F.attention(*[normal(1, 2, h, 4) for h in (3, 2, 2)]), "kv heads=2"),
    ):
        with pytest.raises(ConfigError, match=match):
            call()
    assert F.cross_entropy(x, np.array([1, 5]), ignore_index=5).data > 0


@pytest.mark.parametrize("compiled", [True, False])
def test_dropout_depends_on_the_global_index_only(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(dropout, "compile_cpu", lambda: False)
    key = rng.key(3, "dropout")
    index = rng.indices((6, 50), (0, 0), (6, 50))
    whole = dropout.keep((6, 50), 0.3, key)
    assert np.array_equal(whole, dropout.reference(0.3, key, index))
    part = rng.indices((6, 50), (2, 10), (3, 20))
    assert np.array_equal(dropout.keep((3, 20), 0.3, key, part), whole[2:5, 10:30])
    assert np.array_equal(dropout.keep((2, 3, 4), 0.5, key, index[0, :4]),
                          np.broadcast_to(dropout.keep((4,), 0.5, key), (2, 3, 4)))  # fmt: skip
    many = dropout.keep((100_000,), 0.3, key)
    assert abs(many.mean() - 0.7) < 0.006
    assert dropout.keep((10,), 0.0, key).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_scales_what_it_keeps(dtype: str) -> None:
    x = Tensor(np.ones((40, 50), arrays.dtype(dtype)), True)
    y = F.dropout(x, 0.25, 5)
    assert y.dtype == x.dtype
    values = np.unique(y.data.astype(np.float64))
    assert values[0] == 0
    assert np.isclose(values[1], 4 / 3, rtol=4e-3)
    y.backward(np.ones(y.shape, y.dtype))
    assert np.array_equal(x.grad, y.data)
    assert F.dropout(x, 0.0, 5).data is x.data


STEP = {"lr": 0.01, "weight_decay": 0.1, "grad_scale": 0.5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 20_001])
def test_adamw(size: int, dtype: str) -> None:
    wide = arrays.compute_dtype(arrays.dtype(dtype))
    w, g = normal(size, dtype=dtype), normal(size, dtype=dtype)
    m, v = normal(size).astype(wide), np.abs(normal(size)).astype(wide)
    for step in (1, 10):
        hyper = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": step, **STEP}
        expected = adamw.reference(w, g, m, v, **hyper)
        adamw.adamw_step(w, g, m, v, **hyper)
        for got, want in zip((w, m, v), expected, strict=True):
            close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float, dtype: str) -> None:
    wide = arrays.compute_dtype(arrays.dtype(dtype))
    w, g = normal(20_001, dtype=dtype), normal(20_001, dtype=dtype)
    buffer = normal(20_001).astype(wide) if momentum else None
    expected = sgd.reference(w, g, buffer, momentum=momentum, **STEP)
    sgd.sgd_step(w, g, buffer, momentum=momentum, **STEP)
    close(w, expected[0])
    if buffer is not None:
        close(buffer, expected[1])


def test_steps_refuse_what_they_cannot_write_in_place() -> None:
    w = np.zeros((4, 4))
    with pytest.raises(BufferMismatchError, match="param"):
        sgd.sgd_step(w.T[:2], w[:2], None, 0.1)
    with pytest.raises(BufferMismatchError, match="m="):
        adamw.adamw_step(w, w, w.T, w, 0.1, 0.9, 0.9, 1e-8, 0.0, 1)


class FakeDeviceArray:
    """What a CuPy array looks like from outside."""

    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


def test_device_arrays_beside_those_of_the_host_are_refused() -> None:
    with pytest.raises(ConfigError, match="softmax"):
        softmax.backward(FakeDeviceArray(), normal(2, 3))  # type: ignore[arg-type]


def test_row_helpers() -> None:
    x = normal(5, 192)
    assert np.array_equal(blocks.row_max(x)[:, 0], x.max(1))
    assert np.allclose(blocks.row_sums(x), x.sum(1))
    assert [s.stop - s.start for s in blocks.row_blocks(5, blocks.BLOCK_BYTES // 8)] == [2, 2, 1]


OPS = {
    "softmax": (F.softmax, [(3, 7)]),
    "softmax first": (lambda x: F.softmax(x, 0), [(3, 4, 2)]),
    "log_softmax": (F.log_softmax, [(3, 7)]),
    "log_softmax middle": (lambda x: F.log_softmax(x, 1), [(3, 4, 2)]),
    "gelu": (F.gelu, [(3, 7)]),
    "gelu exact": (lambda x: F.gelu(x, "none"), [(3, 7)]),
    "silu": (F.silu, [(3, 7)]),
    "swiglu": (F.swiglu, [(3, 7), (3, 7)]),
    "layer_norm": (F.layer_norm, [(2, 3, 7), (7,), (7,)]),
    "rms_norm": (F.rms_norm, [(2, 3, 7), (7,)]),
    "rotary": (lambda x: F.rotary(x, np.arange(5) + 3), [(2, 5, 3, 8)]),
    "rotary by row": (lambda x: F.rotary(x, np.array([[1, 5], [9, 2]])), [(2, 2, 1, 4)]),
    "embedding": (lambda w: F.embedding(np.array([[1, 2], [1, 0]]), w), [(5, 3)]),
    "dropout": (lambda x: F.dropout(x, 0.4, 9), [(6, 7)]),
}


@pytest.mark.parametrize("name", OPS)
def test_gradients(name: str) -> None:
    f, shapes = OPS[name]
    assert gradcheck(f, [normal(*shape) for shape in shapes])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_narrow_numbers(name: str, dtype: str) -> None:
    """The gradients in the narrow dtype are those in float64, to a few roundings."""
    f, shapes = OPS[name]
    narrow = [normal(*shape, dtype=dtype) for shape in shapes]
    results = []
    for inputs in (narrow, [x.astype(np.float64) for x in narrow]):
        leaves = [Tensor(x, True) for x in inputs]
        out = f(*leaves)
        seed = np.cos(np.arange(out.size)).reshape(out.shape)
        out.backward(seed.astype(narrow[0].dtype).astype(out.dtype))
        results.append([leaf.grad for leaf in leaves])
    for got, want in zip(*results, strict=True):
        eps = float(ml_dtypes.finfo(got.dtype).eps)
        assert np.abs(got.astype(np.float64) - want).max() <= 8 * eps * (1 + np.abs(want).max())
