"""y_n = w[id_n]; backward: dw[v] = sum of dy_n over all n with id_n = v.

The sum runs in the order of n, so it is the same in every run.  The forms `_held` are for a part of
a table: ids outside 0..num-1 are held by others.
"""

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import host, matrix, widen
from mpipar.kernels.embedding_cuda import gather_cuda, scatter_add_cuda
from mpipar.kernels.native import Floats, Ints, loop, usable


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


@loop
def scatter_add_loop(g: Floats, ids: Ints, dw: Floats, n: int, d: int) -> None:
    """Add the rows of g (n, d) to dw, one after the other."""
    for i in range(n):
        at = ids[i] * d
        for j in range(d):
            dw[at + j] += g[i * d + j]


def gather(w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the rows (..., D) of w (num, D) at ids (...), which are within 0..num-1."""
    if is_device(w):
        return gather_cuda(w, ids)
    host("embedding", ids)
    return np.take(w, ids, axis=0)


def gather_held(w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the rows (..., D) of w (num, D) at ids (...), zeros for those outside 0..num-1."""
    if is_device(w):
        return gather_cuda(w, ids)
    held = (ids >= 0) & (ids < len(w))
    if held.all():
        return gather(w, ids)
    host("embedding", ids)
    out = np.zeros((*ids.shape, w.shape[1]), w.dtype)
    out[held] = w[ids[held]]
    return out


def scatter_add(g: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Return dw (num, D): the sum of the rows of g (..., D) at each of ids (...)."""
    if is_device(g):
        return scatter_add_cuda(g, ids, num)
    host("embedding", ids)
    if usable(g):
        places = np.ascontiguousarray(ids, np.int64)
        dw = np.zeros((num, g.shape[-1]), g.dtype)
        scatter_add_loop(g, places, dw, places.size, g.shape[-1])
        return dw
    return scatter_add_cpu(g, ids, num)


def scatter_add_held(g: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Return dw (num, D), without the rows of g at ids outside 0..num-1."""
    if is_device(g):
        return scatter_add_cuda(g, ids, num)
    host("embedding", ids)
    held = (ids >= 0) & (ids < num)
    return scatter_add(g[held], ids[held], num)
