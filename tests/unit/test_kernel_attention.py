"""Attention in tiles against the full matrix of scores, and as blocks of a ring."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from mpipar import arrays
from mpipar.autograd import Tensor, gradcheck
from mpipar.autograd import functional as F
from mpipar.kernels import attention
from mpipar.kernels.attention import Mask, tiles

RNG = np.random.default_rng(5)


def draw(batch: int, queries: int, keys: int, heads: int, kv: int, dim: int) -> tuple:
    shapes = (batch, queries, heads, dim), (batch, keys, kv, dim), (batch, keys, kv, dim)
    return tuple(RNG.standard_normal(shape) for shape in shapes)


SIZES = [
    (2, 9, 9, 2, 2, 4),
    (1, 64, 64, 4, 2, 8),
    (2, 130, 130, 3, 1, 6),
    (1, 200, 70, 2, 2, 5),
    (1, 150, 520, 2, 1, 3),
    (1, 1, 1, 1, 1, 1),
]
MASKS = [
    Mask(True, 0.3), Mask(False, 0.3), Mask(True, 0.3, 10, 0), Mask(True, 0.3, 10, 50),
    Mask(True, 0.3, 0, 1000), Mask(True, 0.3, 1000, 0), Mask(True, 0.3, 63, 1),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size: tuple, mask: Mask) -> None:
    q, k, v = draw(*size)
    o, lse = attention.forward(q, k, v, mask)
    want_o, want_lse = attention.reference(q, k, v, mask)
    assert np.allclose(o, want_o, atol=1e-13)
    assert np.allclose(lse, want_lse, atol=1e-13)
    do, dlse = RNG.standard_normal(o.shape), RNG.standard_normal(lse.shape)
    delta = attention.row_delta(do, o, dlse)
    grads = attention.backward(do, q, k, v, lse, delta, mask)
    for got, want in zip(grads, dense_backward(do, dlse, q, k, v, mask), strict=True):
        assert np.allclose(got, want, atol=1e-12)


def dense_backward(do, dlse, q, k, v, mask):
    """The gradients written out with the full matrix of probabilities."""
    repeat = q.shape[2] // k.shape[2]
    wide_k, wide_v = np.repeat(k, repeat, 2), np.repeat(v, repeat, 2)
    s = np.einsum("bihd,bjhd->bhij", q, wide_k) * mask.scale
    if mask.causal:
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        s = np.where(mask.k_offset + j <= mask.q_offset + i, s, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e300)
    p = np.exp(s - top)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    dp = np.einsum("bihd,bjhd->bhij", do, wide_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None]) * mask.scale
    dq = np.einsum("bhij,bjhd->bihd", ds, wide_k)
    dk = np.einsum("bhij,bihd->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", p, do)
    groups = (*k.shape[:3], repeat, k.shape[3])
    return dq, dk.reshape(groups).sum(3), dv.reshape(groups).sum(3)


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(causal: bool) -> None:
    inputs = draw(1, 70, 70, 4, 2, 3)
    assert gradcheck(lambda q, k, v: F.attention(q, k, v, causal), inputs)
    both = lambda q, k, v: F.attention(q, k, v, causal, 0.7, True, 5, 20)  # noqa: E731
    assert gradcheck(both, inputs)
    only_lse = lambda q, k, v: both(q, k, v)[1].exp()  # noqa: E731
    assert gradcheck(only_lse, [0.3 * x for x in inputs])


def test_values_may_have_another_size_than_keys() -> None:
    q, k, _ = draw(1, 5, 5, 2, 2, 4)
    v = RNG.standard_normal((1, 5, 2, 7))
    assert F.attention(q, k, v).shape == (1, 5, 2, 7)
    assert gradcheck(F.attention, (q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_numbers(dtype: str) -> None:
    narrow = [x.astype(arrays.dtype(dtype)) for x in draw(2, 90, 90, 4, 2, 16)]
    leaves = [Tensor(x, True) for x in narrow]
    out = F.attention(*leaves)
    assert out.dtype == arrays.dtype(dtype)
    want, _ = attention.reference(*narrow, Mask(True, 0.25))
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    assert np.abs(out.data.astype(np.float64) - want).max() <= 4 * eps * np.abs(want).max()
    do = RNG.standard_normal(out.shape).astype(out.dtype)
    out.backward(do)
    wide = [x.astype(np.float64) for x in narrow]
    grads = dense_backward(do.astype(np.float64), np.zeros((2, 4, 90)), *wide, Mask(True, 0.25))
    for leaf, expected in zip(leaves, grads, strict=True):
        assert leaf.grad.dtype == out.dtype
        error = np.abs(leaf.grad.astype(np.float64) - expected).max()
        assert error <= 16 * eps * np.abs(expected).max()


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_logits_of_ten_thousand(logit: float) -> None:
    """All scores of a row are near +-1e4: the softmax of their small differences is right."""
    dim = 4
    q = np.ones((1, 80, 1, dim), np.float32)
    k = np.full((1, 80, 1, dim), logit / dim, np.float32)
    k[..., 0] += RNG.integers(0, 3, (1, 80, 1))
    v = RNG.standard_normal((1, 80, 1, dim)).astype(np.float32)
    leaves = [Tensor(x, True) for x in (q, k, v)]
    out = F.attention(*leaves, scale=1.0)
    mask = Mask(True, 1.0)
    want, _ = attention.reference(q, k, v, mask)
    assert np.abs(out.data - want).max() < 1e-5
    do = RNG.standard_normal(out.shape).astype(np.float32)
    out.backward(do)
    grads = dense_backward(
        do, np.zeros((1, 1, 80)), *(x.astype(np.float64) for x in (q, k, v)), mask
    )
    rounding = 8 * np.finfo(np.float32).eps * np.abs(k).max()  # of the sums of +-k in dq
    for leaf, expected, limit in zip(leaves, grads, (rounding, 3e-5, 3e-5), strict=True):
        assert np.abs(leaf.grad - expected).max() < limit
    assert np.isfinite(F.attention(q, k * 100, v).data).all()


@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_of_keys_make_the_whole(blocks: int) -> None:
    """What ring attention does: outputs merge by lse, gradients add with the lse of all keys."""
    q, k, v = draw(2, 150, 150, 4, 2, 8)
    mask = Mask(True, 0.5)
    o, lse = attention.forward(q, k, v, mask)
    bounds = np.linspace(0, 150, blocks + 1).astype(int)
    parts = [
        (k[:, a:b], v[:, a:b], mask._replace(k_offset=int(a)))
        for a, b in itertools.pairwise(bounds)
    ]
    results = [attention.forward(q, *part) for part in parts]
    total = np.logaddexp.reduce([each for _, each in results])
    assert np.allclose(total, lse)
    weights = [np.exp(each - total).transpose(0, 2, 1)[..., None] for _, each in results]
    merged = sum(w * out for w, (out, _) in zip(weights, results, strict=True))
    assert np.allclose(merged, o, atol=1e-13)
    do = RNG.standard_normal(o.shape)
    delta = attention.row_delta(do, o)
    dq, dk, dv = attention.backward(do, q, k, v, lse, delta, mask)
    grads = [attention.backward(do, q, bk, bv, lse, delta, m) for bk, bv, m in parts]
    assert np.allclose(sum(g[0] for g in grads), dq, atol=1e-12)
    assert np.allclose(np.concatenate([g[1] for g in grads], 1), dk, atol=1e-12)
    assert np.allclose(np.concatenate([g[2] for g in grads], 1), dv, atol=1e-12)


def test_the_full_matrix_of_scores_never_exists() -> None:
    """The scratch of one tile does not grow with the number of queries."""
    q, k, _ = draw(1, 1024, 256, 2, 2, 4)
    tile = q[:, : tiles.TILE]
    assert tiles.space_for(q, k) == tiles.space_for(tile, k) == 2 * tiles.TILE * 256


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_a_split_array_are_pieces_of_one(groups: int) -> None:
    """Equal to those of three arrays, and `split` returns the whole without a copy."""
    fused = np.random.default_rng(0).standard_normal((2, 9, 4 + 2 * groups, 8))
    whole = Tensor(fused, requires_grad=True)
    apart = [Tensor(x.copy(), requires_grad=True) for x in np.split(fused, [4, 4 + groups], 2)]
    F.attention(*F.split(whole, (4, groups, groups), dim=2)).backward(np.ones((2, 9, 4, 8)))
    F.attention(*apart).backward(np.ones((2, 9, 4, 8)))
    expected = np.concatenate([x.grad for x in apart if x.grad is not None], 2)
    assert whole.grad is not None
    np.testing.assert_array_equal(whole.grad, expected)
