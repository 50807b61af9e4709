"""y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), or exactly x/2 * (1 + erf(x / sqrt(2))).

Hendrycks and Gimpel, Gaussian Error Linear Units (2016).  Backward computes dy/dx
again from x, of which nothing else is kept:

    tanh:  dy/dx = (1 + t)/2 + x/2 * (1 - t^2) * sqrt(2/pi) * (1 + 3 * 0.044715 x^2)
    none:  dy/dx = (1 + erf(x / sqrt 2))/2 + x * exp(-x^2/2) / sqrt(2 pi)
"""

import functools
import math

import numpy as np

from mpipar.arrays import compute_dtype, is_device
from mpipar.errors import ConfigError, explain
from mpipar.kernels.blocks import element_blocks, element_scratch, host, place, store, widen
from mpipar.kernels.gelu_cuda import backward_cuda, forward_cuda
from mpipar.kernels.native import Floats, loop, usable
from mpipar.kernels.native_math import ONE, F, exp

ROOT = math.sqrt(2 / math.pi)
CUBIC = 0.044715
LINEAR, CUBE, THREE = F(-2 * ROOT), F(-2 * ROOT * CUBIC), F(3)  # -2u = x (LINEAR + CUBE x^2)
LOWEST, HIGHEST = F(-8), F(8)  # beyond, dy/dx is 0 or 1 and changes no more


def reference(x: np.ndarray, approximate: str = "tanh") -> np.ndarray:
    """Return y in float64."""
    z = x.astype(np.float64)
    if approximate == "tanh":
        return z / 2 * (1 + np.tanh(ROOT * (z + CUBIC * z**3)))
    return z / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2)))


def blocks_cpu(x: np.ndarray, approximate: str, g: np.ndarray | None) -> np.ndarray:
    """Return y, or g dy/dx if g is given."""
    flat, out = x.reshape(-1), np.empty(x.shape, x.dtype)
    results, grads = out.reshape(-1), None if g is None else g.reshape(-1)
    wide = compute_dtype(x.dtype)
    space = element_scratch(4, flat.size, wide)
    rule = _tanh_block if approximate == "tanh" else _exact_block
    for block in element_blocks(flat.size, wide.itemsize):
        part = widen(flat[block])
        target = place(results, block, space[2])
        if grads is None:
            rule(part, target, None, space[:2, : len(part)])
        else:
            rule(part, space[3, : len(part)], target, space[:2, : len(part)])
            target *= widen(grads[block])
        store(results, block, target)
    return out


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


@loop
def forward_loop(x: Floats, y: Floats, n: int) -> None:
    """Write y for the tanh: y = x / (1 + e^-2u), as (1 + tanh u)/2 = 1 / (1 + e^-2u)."""
    for i in range(n):
        v = x[i]
        y[i] = v / (ONE + exp(v * (LINEAR + CUBE * v * v)))


@loop
def backward_loop(x: Floats, g: Floats, dx: Floats, n: int) -> None:
    """Write g dy/dx for the tanh: with s = (1 + t)/2, dy/dx = s + x s (1 - s) 2 du/dx."""
    for i in range(n):
        v = LOWEST if x[i] < LOWEST else HIGHEST if x[i] > HIGHEST else x[i]
        square = v * v
        e = exp(v * (LINEAR + CUBE * square))
        s = ONE / (ONE + e)
        dx[i] = g[i] * (s - v * s * (e * s) * (LINEAR + THREE * CUBE * square))


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


def forward(x: np.ndarray, approximate: str = "tanh") -> np.ndarray:
    """Return y, like x.  Raises ConfigError for another approximation."""
    if approximate not in ("tanh", "none"):
        rule = 'it is "tanh" or "none"'
        raise ConfigError(explain("approximate", approximate, rule, "Choose one of them"))
    if is_device(x):
        return forward_cuda(x, approximate)
    if approximate == "tanh" and usable(x):
        y = np.empty(x.shape, x.dtype)
        forward_loop(x, y, x.size)
        return y
    return blocks_cpu(x, approximate, None)


def backward(g: np.ndarray, x: np.ndarray, approximate: str = "tanh") -> np.ndarray:
    """Return the gradient of x from g, that of y."""
    if is_device(x):
        return backward_cuda(g, x, approximate)
    host("gelu", g)
    if approximate == "tanh" and usable(g, x):
        dx = np.empty(x.shape, x.dtype)
        backward_loop(x, g, dx, x.size)
        return dx
    return blocks_cpu(x, approximate, g)
