"""Rotary position embedding: each pair (x_i, x_{i+D/2}) turns by the angle position * base^(-2i/D).

Su et al., RoFormer (2021), with the pairs split in halves as in GPT-NeoX and Llama's released code:

    y_i       = x_i cos a_i - x_{i+D/2} sin a_i
    y_{i+D/2} = x_{i+D/2} cos a_i + x_i sin a_i          a_i = position * base^(-2i/D)

A rotation is orthogonal, so backward turns the other way.
"""

import functools

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.kernels.blocks import BLOCK_BYTES, host, widen

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
    """Return x (B, S, H, D) rotated forth or back, in blocks of positions."""
    out, half = np.empty(x.shape, x.dtype), x.shape[-1] // 2
    batch, seq, heads, _ = x.shape
    step = max(1, BLOCK_BYTES // max(heads * half * 8, 1))
    space = np.empty((min(step, seq), heads, half), compute_dtype(x.dtype))
    cos, sin = (np.broadcast_to(t, (batch, seq, 1, half)) for t in (cos, sin))
    for b in range(batch):
        for start in range(0, seq, step):
            at = (b, slice(start, min(start + step, seq)))
            part, c, s = widen(x[at]), cos[at], sin[at]
            left, right, t = part[..., :half], part[..., half:], space[: len(part)]
            y = out[at] if out.dtype == space.dtype else np.empty(part.shape, space.dtype)
            np.multiply(left, c, out=y[..., :half])
            np.multiply(right, c, out=y[..., half:])
            minus, plus = (np.add, np.subtract) if back else (np.subtract, np.add)
            minus(y[..., :half], np.multiply(right, s, out=t), out=y[..., :half])
            plus(y[..., half:], np.multiply(left, s, out=t), out=y[..., half:])
            if out.dtype != space.dtype:
                out[at] = y
    return out


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, back: bool = False) -> np.ndarray:
    """Return x (B, S, H, D) turned by the angles of `table`, or back."""
    host("rotary", x)
    return rotate_cpu(x, cos, sin, back)
