"""Embedding: rows at ids, and the sums of the gradients of equal ids."""

from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.kernels import embedding
from mpipar.kernels.device import FLOATS
from mpipar.kernels.embedding_cuda import gather_cuda, scatter_add_cuda
from tests.cuda.compare import close

# rows of the table, width, shape of the ids
TINY: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "float32": [(4, 35, (2, 3)), (2, 3, (107,)), (3, 8, (5,))],
    "float64": [(3, 1030, (2,))],
    "bfloat16": [(3, 5, (4,)), (3, 16, (4,))],
}
LARGE = [(50_257, 768, (8, 1024)), (7, 33, (4000,)), (100, 5000, (3, 100))]


def run(xp: Any, sizes: str) -> None:
    """Compare rows with NumPy's, and sums with the formula; twice, for the same bits."""
    for number, name in enumerate(FLOATS):
        for num, d, shape in TINY.get(name, [(3, 5, (4,))]) if sizes == "tiny" else LARGE:
            rng = np.random.default_rng(number)
            w = rng.standard_normal((num, d)).astype(dtype_of(name))
            g = rng.standard_normal((*shape, d)).astype(dtype_of(name))
            ids = rng.integers(0, num, shape)
            table, grad, places = (xp.asarray(a) for a in (w, g, ids))
            close(gather_cuda(table, places.astype(np.int32)), w[ids].astype(np.float64), 0)
            dw = scatter_add_cuda(grad, places, num)
            held(xp, w[: num - 1], g, ids)
            close(dw, embedding.reference(g, ids, num), 8 + np.bincount(ids.reshape(-1)).max())
            if sizes != "tiny":
                again = scatter_add_cuda(grad, places, num)
                assert dw.get().tobytes() == again.get().tobytes()
    empty(xp)


def held(xp: Any, w: np.ndarray, g: np.ndarray, ids: np.ndarray) -> None:
    """Compare a part of a table: ids below and above it give zeros, and are not added."""
    ids = ids.reshape(-1) - 1
    inside, table = (ids >= 0) & (ids < len(w)), xp.asarray(w)
    wanted = np.where(inside[:, None], w[ids % len(w)].astype(np.float64), 0)
    close(gather_cuda(table, xp.asarray(ids)), wanted, 0)
    rows = g.reshape(len(ids), -1)
    right = embedding.reference(rows[inside], ids[inside], len(w))
    close(scatter_add_cuda(xp.asarray(rows), xp.asarray(ids), len(w)), right, 8 + len(ids))


def empty(xp: Any) -> None:
    """Add nothing."""
    none = scatter_add_cuda(xp.empty((0, 3), np.float32), xp.empty(0, np.int64), 2)
    close(none, np.zeros((2, 3)))
