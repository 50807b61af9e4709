"""Attention: forward and backward, masked or not, grouped heads, offsets of a ring's blocks."""

from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels.attention import Mask, row_delta
from mpipar.kernels.attention.cpu import backward_cpu
from mpipar.kernels.attention.cuda import backward_cuda, forward_cuda
from mpipar.kernels.attention.formula import reference

# batch, queries, keys, heads, kv heads, width, causal, offset of queries and of keys
TINY = {
    "float32": [(1, 5, 5, 2, 1, 6, True, 0, 0)],
    "float64": [(1, 3, 34, 1, 1, 3, True, 40, 8)],
    "bfloat16": [(1, 33, 2, 1, 1, 5, True, 0, 1)],
    "float16": [(1, 2, 3, 1, 1, 65, False, 0, 0)],
}
LARGE = {
    dtype: [(2, 1000, 1000, 8, 2, 64, True, 0, 0), (1, 257, 511, 3, 3, 80, False, 0, 0)]
    for dtype in TINY
}
EPS = {"float64": 1e-14, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def run(xp: Any, sizes: str) -> None:
    """Compare with the formula, and gradients with those of the CPU in float64."""
    rng = np.random.default_rng(0)
    for name, cases in (TINY if sizes == "tiny" else LARGE).items():
        for batch, queries, keys, heads, groups, width, causal, q_at, k_at in cases:
            shapes = [(batch, queries, heads, width)] * 2 + [(batch, keys, groups, width)] * 2
            do, q, k, v = (rng.standard_normal(s).astype(dtype_of(name)) for s in shapes)
            mask = Mask(causal, width**-0.5, q_at, k_at)
            wanted, lse = reference(q, k, v, mask)
            o, found = forward_cuda(*(xp.asarray(a) for a in (q, k, v)), mask)
            close(o, wanted, EPS[name])
            close(found, lse, max(1e-7, EPS["float32"]) if name != "float64" else 1e-14)
            wide = [a.astype(np.float64) for a in (do, q, k, v)]
            delta = row_delta(wide[0], wanted)
            right = tuple(np.empty(a.shape) for a in wide[1:])
            backward_cpu(*wide, lse, delta, mask, lambda: None, right)
            arrays = [xp.asarray(a) for a in (do, q, k, v, lse, delta)]
            got = tuple(xp.empty(a.shape, a.dtype) for a in arrays[1:4])
            backward_cuda(*arrays, mask, got)
            for one, other in zip(got, right, strict=True):
                close(one, other, 3 * EPS[name])


def close(got: Any, wanted: np.ndarray, eps: float) -> None:
    """Compare, with a tolerance of the largest element."""
    host = got.get() if hasattr(got, "get") else got
    host = np.asarray(host, np.float64)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(host[~finite], wanted[~finite])
    scale = max(1.0, float(np.abs(wanted[finite]).max(initial=0)))
    np.testing.assert_allclose(host[finite], wanted[finite], rtol=eps, atol=eps * scale)
