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
from mpipar.kernels.blocks import BLOCK_BYTES, host, widen

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
    step = BLOCK_BYTES // wide.itemsize // 2
    space = [np.empty(min(step, flat.size), wide) for _ in range(3)]
    rule = _tanh_block if approximate == "tanh" else _exact_block
    for start in range(0, flat.size, step):
        block = slice(start, min(start + step, flat.size))
        part = widen(flat[block])
        y, d = rule(part, [s[: len(part)] for s in space], derivative)
        ys[block] = y
        if ds is not None:
            ds[block] = d
    return out, slope


def _tanh_block(
    x: np.ndarray, space: list[np.ndarray], derivative: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and dy/dx of one block, in the scratch arrays."""
    square, t, u = space
    np.multiply(x, x, out=square)
    np.multiply(square, ROOT * CUBIC, out=t)
    t += ROOT
    t *= x
    np.tanh(t, out=t)
    np.multiply(t, 0.5, out=u)
    u += 0.5  # (1 + t) / 2
    if derivative:
        square *= 1.5 * ROOT * CUBIC
        square += 0.5 * ROOT
        square *= x  # x/2 * ROOT * (1 + 3 CUBIC x^2)
        np.multiply(t, t, out=t)
        np.subtract(1, t, out=t)
        t *= square
        t += u
    u *= x
    return u, t


def _exact_block(
    x: np.ndarray, space: list[np.ndarray], derivative: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and dy/dx of one block, in the scratch arrays."""
    t, u, _ = space
    np.multiply(erf(x / math.sqrt(2)), 0.5, out=u)
    u += 0.5
    if derivative:
        np.multiply(x, x, out=t)
        t *= -0.5
        np.exp(t, out=t)
        t *= x / math.sqrt(2 * math.pi)
        t += u
    u *= x
    return u, t


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
