"""Rotary position embedding: each pair (x_i, x_{i+D/2}) turns by the angle position * base^(-2i/D).

Su et al., RoFormer (2021), with the pairs split in halves as in GPT-NeoX and Llama's released code:

    y_i       = x_i cos a_i - x_{i+D/2} sin a_i
    y_{i+D/2} = x_{i+D/2} cos a_i + x_i sin a_i          a_i = position * base^(-2i/D)

A rotation is orthogonal, so backward turns the other way.
"""

import functools

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.kernels.blocks import block_rows, host, place, row_blocks, store, widen
from mpipar.kernels.native import FLOAT32, Floats, loop, usable
from mpipar.kernels.rotary_cuda import rotate_cuda

Table = tuple[np.ndarray, np.ndarray]


def reference(x: np.ndarray, positions: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """Return the rotated x (B, S, H, D) in float64; positions (S,) or (B, S)."""
    half = x.shape[-1] // 2
    a = positions[..., None, None] * base ** (-np.arange(half) / half)  # (S, 1, D/2)
    z = x.astype(np.float64)
    left, right = z[..., :half], z[..., half:]
    return np.concatenate(
        [left * np.cos(a) - right * np.sin(a), right * np.cos(a) + left * np.sin(a)], -1
    )


def table(positions: np.ndarray, dim: int, base: float, dtype: np.dtype) -> Table:
    """Return cosines and sines (..., S, 1, D/2) for positions (S,) or (B, S); cached when small."""
    places = np.ascontiguousarray(positions, np.int64)
    return _table(places.tobytes(), places.shape, dim, base, np.dtype(dtype).char)


@functools.lru_cache(maxsize=16)
def _table(places: bytes, shape: tuple[int, ...], dim: int, base: float, char: str) -> Table:
    half = dim // 2
    positions = np.frombuffer(places, np.int64).reshape(shape)
    angle = positions[..., None, None] * base ** (-np.arange(half) / half)
    return np.cos(angle).astype(char), np.sin(angle).astype(char)


def rotate_cpu(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, back: bool) -> np.ndarray:
    """Return x (B, S, H, D) rotated forth or back: y = x cos + swapped(x) (-sin, sin)."""
    out = np.empty(x.shape, x.dtype)
    _, seq, heads, dim = x.shape
    half = dim // 2
    wide = compute_dtype(x.dtype)
    space = np.empty((2, block_rows(heads * dim, wide.itemsize), heads, dim), wide)
    shared = cos.ndim == 3  # the same positions in every row of the batch
    for block in row_blocks(seq, heads * dim, wide.itemsize):
        for b in range(len(x)):
            if b == 0 or not shared:
                c, s = (t[block] if shared else t[b, block] for t in (cos, sin))
                s = -s if back else s
                full_c, full_s = _spread(c, c, heads), _spread(-s, s, heads)
            part, y = widen(x[b, block]), place(out[b], block, space[0])
            t = space[1, : len(part)]
            t[..., :half], t[..., half:] = part[..., half:], part[..., :half]
            t *= full_s
            np.multiply(part, full_c, out=y)
            y += t
            store(out[b], block, y)
    return out


def _spread(left: np.ndarray, right: np.ndarray, heads: int) -> np.ndarray:
    """Return (left, right), each (T, 1, D/2), side by side and for every head: (T, H, D)."""
    return np.repeat(np.concatenate([left, right], axis=-1), heads, axis=1)


@loop
def rotate_loop(
    x: Floats, cos: Floats, sin: Floats, y: Floats, batch: int, rows: int, heads: int, half: int,
    next_batch: int, next_row: int, next_angles: int, sign: float,
) -> None:  # fmt: skip
    """Write x (batch, rows, heads, 2 half) turned.

    next_...: the steps in x, and to the angles of the next of the batch: 0 if they are the same.
    """
    for b in range(batch):
        for i in range(rows):
            angle = b * next_angles + i * half
            for h in range(heads):
                at, to = b * next_batch + i * next_row, (b * rows + i) * heads * 2 * half
                at, to = at + h * 2 * half, to + h * 2 * half
                for d in range(half):
                    left, right = x[at + d], x[at + half + d]
                    c, s = cos[angle + d], sin[angle + d] * sign
                    y[to + d] = left * c - right * s
                    y[to + half + d] = right * c + left * s


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, back: bool = False) -> np.ndarray:
    """Return x (B, S, H, D) turned by the angles of `table`, or back."""
    if is_device(x):
        return rotate_cuda(x, cos, sin, back)
    host("rotary", cos, sin)
    if x.dtype == FLOAT32 and usable(cos, sin) and x.strides[2:] == (4 * x.shape[3], 4):
        y, (batch, rows, heads, width) = np.empty(x.shape, x.dtype), x.shape
        steps = x.strides[0] // 4, x.strides[1] // 4, cos[0].size if cos.ndim == 4 else 0
        sign = -1.0 if back else 1.0
        rotate_loop(x, cos, sin, y, batch, rows, heads, width // 2, *steps, sign)
        return y
    return rotate_cpu(x, cos, sin, back)
