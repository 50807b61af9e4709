"""y_n = w[id_n]; backward: dw[v] = sum of dy_n over all n with id_n = v.

The sum runs in the order of n (sorted stably by id), so it is the same in every run.
"""

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import host, matrix, widen


def reference(g: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Return dw (num, D) in float64 for g (..., D)."""
    dw = np.zeros((num, g.shape[-1]))
    np.add.at(dw, ids.reshape(-1), matrix(g).astype(np.float64))
    return dw


def scatter_add_cpu(g: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Return dw: the rows of each id, brought together by a sort, are added."""
    rows, flat = matrix(g), ids.reshape(-1)
    dw = np.zeros((num, rows.shape[1]), compute_dtype(g.dtype))
    if not flat.size:
        return dw.astype(g.dtype, copy=False)
    order = np.argsort(flat, kind="stable")
    found, starts = np.unique(flat[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)]
    for v, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True):
        dw[v] = np.add.reduce(widen(rows[order[start:stop]]), axis=0)
    return dw.astype(g.dtype, copy=False)


def gather(w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the rows (..., D) of w (num, D) at ids (...), which are within 0..num-1."""
    host("embedding", w, ids)
    return np.take(w, ids, axis=0)


def scatter_add(g: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Return dw (num, D): the sum of the rows of g (..., D) at each of ids (...)."""
    host("embedding", g, ids)
    return scatter_add_cpu(g, ids, num)
