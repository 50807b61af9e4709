"""y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), or exactly x/2 * (1 + erf(x / sqrt(2))).

Hendrycks and Gimpel, Gaussian Error Linear Units (2016).  Forward also gives dy/dx when asked, so
that backward is one product and x need not be kept:

    tanh:  dy/dx = (1 + t)/2 + x/2 * (1 - t^2) * sqrt(2/pi) * (1 + 3 * 0.044715 x^2)
    none:  dy/dx = (1 + erf(x / sqrt 2))/2 + x * exp(-x^2/2) / sqrt(2 pi)
"""

import functools
import math

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.errors import ConfigError, explain
from mpipar.kernels.blocks import element_blocks, element_scratch, host, place, store, widen

ROOT = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def reference(x: np.ndarray, approximate: str = "tanh") -> np.ndarray:
    """Return y in float64."""
    z = x.astype(np.float64)
    if approximate == "tanh":
        return z / 2 * (1 + np.tanh(ROOT * (z + CUBIC * z**3)))
    return z / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2)))


def forward_cpu(
    x: np.ndarray, approximate: str, derivative: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return y and, if asked, dy/dx."""
    flat, out = x.reshape(-1), np.empty(x.shape, x.dtype)
    slope = np.empty(x.shape, x.dtype) if derivative else None
    ys, ds = out.reshape(-1), None if slope is None else slope.reshape(-1)
    wide = compute_dtype(x.dtype)
    space = element_scratch(4, flat.size, wide)
    rule = _tanh_block if approximate == "tanh" else _exact_block
    for block in element_blocks(flat.size, wide.itemsize):
        part = widen(flat[block])
        y = place(ys, block, space[2])
        d = None if ds is None else place(ds, block, space[3])
        rule(part, y, d, space[:2, : len(part)])
        store(ys, block, y)
        if ds is not None and d is not None:
            store(ds, block, d)
    return out, slope


def _tanh_block(x: np.ndarray, y: np.ndarray, d: np.ndarray | None, space: np.ndarray) -> None:
    """Write y and dy/dx of one block: with s = (1 + t)/2, y = x s and (1 - t^2)/2 = 2 s (1 - s)."""
    square, s = space
    np.multiply(x, x, out=square)
    np.multiply(square, ROOT * CUBIC, out=s)
    s += ROOT
    s *= x
    np.tanh(s, out=s)
    s *= 0.5
    s += 0.5
    np.multiply(x, s, out=y)
    if d is not None:
        np.subtract(1, s, out=d)
        d *= y
        square *= 6 * ROOT * CUBIC
        square += 2 * ROOT
        d *= square
        d += s


def _exact_block(x: np.ndarray, y: np.ndarray, d: np.ndarray | None, space: np.ndarray) -> None:
    """Write y and dy/dx of one block."""
    s, t = space
    np.multiply(erf(x / math.sqrt(2)), 0.5, out=s)
    s += 0.5
    np.multiply(x, s, out=y)
    if d is not None:
        np.multiply(x, x, out=t)
        t *= -0.5
        np.exp(t, out=d)
        d *= np.multiply(x, 1 / math.sqrt(2 * math.pi), out=t)
        d += s


@functools.cache
def _erf_coefficients() -> tuple[float, ...]:
    """Return Chebyshev coefficients of log(erfc(z)/t) + z^2 in 2t - 1, where t = 2 / (2 + z)."""
    nodes = np.cos(np.pi * (np.arange(48) + 0.5) / 48)
    t = (nodes + 1) / 2
    values = [_log_erfcx(2 / a - 2) - math.log(a) for a in t.tolist()]
    return tuple(np.polynomial.chebyshev.chebfit(nodes, values, 28).tolist())


def _log_erfcx(z: float) -> float:
    """Return log(erfc(z)) + z^2: by the asymptotic series where erfc(z) is too small."""
    if z < 25:
        return math.log(math.erfc(z)) + z * z
    term = total = 1.0
    for n in range(1, 12):
        term *= -(2 * n - 1) / (2 * z * z)
        total += term
    return math.log(total / (z * math.sqrt(math.pi)))


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function of each element, to about 1e-15 (Numerical Recipes, 6.2.2)."""
    z = np.minimum(np.abs(x), 26)  # beyond, erfc is 0
    t = 2 / (2 + z)
    twice = 4 * t - 2
    coefficients = _erf_coefficients()
    a, b = np.zeros_like(z), np.zeros_like(z)
    for c in coefficients[:0:-1]:  # Clenshaw's recurrence
        a, b = twice * a - b + c, a
    tail = t * np.exp(0.5 * twice * a - b + coefficients[0] - z * z)
    return np.copysign(1 - tail, x)


def forward(
    x: np.ndarray, approximate: str = "tanh", derivative: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return y and, if asked, dy/dx, both like x.  Raises ConfigError for another approximation."""
    if approximate not in ("tanh", "none"):
        rule = 'it is "tanh" or "none"'
        raise ConfigError(explain("approximate", approximate, rule, "Choose one of them"))
    host("gelu", x)
    return forward_cpu(x, approximate, derivative)
