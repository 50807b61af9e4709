"""Attention over blocks of keys, put together: against all keys at once."""

import numpy as np
import pytest

from mpipar.errors import BufferMismatchError
from mpipar.kernels import attention, merge
from mpipar.kernels.attention import Mask

RNG = np.random.default_rng(8)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [0.3, 1e4])
def test_blocks_of_keys_in_any_order(dtype: str, scale: float) -> None:
    q, k, v = (RNG.standard_normal((2, 12, 3, 4)).astype(dtype) for _ in range(3))
    mask = Mask(True, scale)
    cuts = (slice(5, 9), slice(0, 5), slice(9, 12), slice(3, 3))
    parts = [attention.forward(q, k[:, c], v[:, c], mask._replace(k_offset=c.start)) for c in cuts]
    assert np.isneginf(parts[2][1]).any()  # queries that see nothing of a block
    expected = merge.reference([o for o, _ in parts], [lse for _, lse in parts])
    whole = attention.reference(q, k, v, mask)
    out, lse = np.zeros_like(q), np.full((2, 3, 12), -np.inf)
    for part in parts:
        merge.merge(out, lse, *part)
    near = {"rtol": 0, "atol": 1e-12 if dtype == "float64" else 1e-5}
    for result in (expected, (out, lse)):
        np.testing.assert_allclose(result[0], whole[0], **near)
        np.testing.assert_allclose(result[1], whole[1], rtol=1e-6, atol=1e-12)
    assert out.dtype == dtype


def test_nothing_seen_at_all() -> None:
    out, lse = np.zeros((1, 2, 1, 3)), np.full((1, 1, 2), -np.inf)
    merge.merge(out, lse, out.copy(), lse.copy())
    assert not out.any()
    assert np.isneginf(lse).all()
    total, log = merge.reference([out, out], [lse, lse])
    assert not total.any()
    assert np.isneginf(log).all()


def test_other_queries_are_refused() -> None:
    out, lse = np.zeros((1, 2, 1, 3)), np.zeros((1, 1, 2))
    with pytest.raises(BufferMismatchError, match="block"):
        merge.merge(out, lse, out[:, :1], lse[..., :1])
    with pytest.raises(BufferMismatchError, match="block"):
        merge.merge(out, lse, out.astype("float32"), lse)
