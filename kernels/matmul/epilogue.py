"""What is done with each element of a product before it is written, and the order of tiles.

v = sum over k of op(A) op(B);  v += bias;  v = gelu(v), or v = silu(v) * up;
v += residual;  v += C, if the product is added to what is there;  C = v, rounded once
"""

import math
from typing import Any

from mpipar.kernels.device import constant, device, narrow, widen

# bits of a kernel's last argument
TRANSPOSE_A, TRANSPOSE_B, ACCUMULATE, BIAS, GELU, SILU, UP, RESIDUAL = (1 << n for n in range(8))
GROUP = 8  # rows of tiles that go along n together, so that they find B in the second-level cache


@device
def tile_of(block: Any, m: Any, n: Any, height: Any, width: Any) -> Any:
    """Return which matrix of the batch, first row and first column a block has."""
    rows, columns = (m + height - 1) // height, (n + width - 1) // width
    batch, tile = block // (rows * columns), block % (rows * columns)
    group, within = tile // (GROUP * columns), tile % (GROUP * columns)
    size = min(GROUP, rows - group * GROUP)
    row, column = group * GROUP + within % size, within // size
    return batch, row * height, column * width


@device
def gelu(v: Any, like: Any) -> Any:
    """Return v/2 (1 + tanh u) = v / (1 + e^-2u), u = sqrt(2/pi) (v + 0.044715 v^3)."""
    u = constant(-1.5957691216057308, like) * (v + constant(0.044715, like) * v * v * v)
    return v / (constant(1, like) + math.exp(u))


@device
def silu(v: Any, like: Any) -> Any:
    """Return v / (1 + e^-v)."""
    return v / (constant(1, like) + math.exp(-v))


@device
def after(v: Any, bias: Any, up: Any, residual: Any, old: Any, flags: Any, like: Any) -> Any:
    """Return what becomes of a sum; zeros for what there is not, and `up` is then not used."""
    v += bias
    if flags & GELU:
        v = gelu(v, like)
    if flags & SILU:
        v = silu(v, like)
    if flags & UP:
        v *= up
    return v + residual + old


@device
def element(x: Any, place: Any, there: Any) -> Any:
    """Return an element, or zero."""
    value = constant(0, x)
    if there:
        value = widen(x[place])
    return value


@device
def finish(
    v: Any, c: Any, bias: Any, up: Any, residual: Any, batch: Any, row: Any, column: Any,
    m: Any, n: Any, flags: Any,
) -> Any:  # fmt: skip
    """Write element (row, column) of a matrix of C, if it is inside."""
    if row < m and column < n:
        place = (batch * m + row) * n + column
        b, u = element(bias, column, flags & BIAS), element(up, place, flags & UP)
        r, old = element(residual, place, flags & RESIDUAL), element(c, place, flags & ACCUMULATE)
        c[place] = narrow(after(v, b, u, r, old, flags, c), c)
