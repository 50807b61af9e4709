"""M ~ left^T right: a matrix as the sum of a few outer products.

    left (r, n)   right (r, m)      out_ij = sum_k left_ki right_kj

`orthonormalise` makes the rows of `left` orthonormal: modified Gram-Schmidt in float64, every row
twice (Giraud et al. 2005: twice is enough).  A row that depends on those before it is left zero.

Both that and `product` are additions and multiplications in a fixed order, without BLAS: the same
operands give the same bits on any processor and any number of threads, so that ranks which hold
the same factors get the same matrix.  `subtract_product` need not, and is a matrix product.

Cost on the CPU: `product` 2r passes over blocks that stay in the cache, and one over `out`.
"""

import numpy as np

from mpipar.arrays import Array, module_of

BLOCK = 1 << 15  # elements of a block of rows: 128 KiB of float32
DEPENDENT = 1e-12  # what is left of a row that counts as nothing


def reference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return left^T right in float64 (for the tests)."""
    return left.astype(np.float64).T @ right.astype(np.float64)


def orthonormalise(rows: Array) -> list[int]:
    """Make the rows (r, n) orthonormal in place, from the first on.

    Returns the numbers of the rows that became zero, as the earlier ones span them.
    """
    xp = module_of(rows)
    made: list[Array] = []
    zero = []
    for k in range(rows.shape[0]):
        row = rows[k].astype(np.float64)
        before = float(xp.sqrt((row * row).sum()))
        for other in made * 2:
            row -= (other * row).sum() * other
        norm = float(xp.sqrt((row * row).sum()))
        if norm <= DEPENDENT * before:
            zero.append(k)
            row = xp.zeros_like(row)
        else:
            row /= norm
            made.append(row)
        rows[k] = row
    return zero


def product(left: Array, right: Array, out: Array) -> None:
    """Write left^T right to `out` (n, m); rounded once if that has 16 bits."""
    xp = module_of(out)
    for rows in _blocks(out):
        total = left[0, rows, None] * right[0]  # (rows, m)
        term = xp.empty_like(total)
        for k in range(1, left.shape[0]):
            total += xp.multiply(left[k, rows, None], right[k], out=term)
        out[rows] = total


def subtract_product(left: Array, right: Array, out: Array) -> None:
    """Subtract left^T right from `out` (n, m)."""
    for rows in _blocks(out):
        out[rows] -= left[:, rows].T @ right


def _blocks(out: Array) -> list[slice]:
    """Return slices of rows of `out`: the blocks."""
    step = max(1, BLOCK // out.shape[1])
    return [slice(start, start + step) for start in range(0, out.shape[0], step)]
