"""A small product for loops, with its sums in registers: C (8, n) = A (8, k) B (k, n), n 32 or 16.

Written here for Python; kernels/native_vector.py is what the compiler takes in its place.  A has
any steps, so that it may be a transpose; the rows of B and C lie one after the other.  Products of
other sizes are made of these (Goto and van de Geijn, Anatomy of High-Performance Matrix
Multiplication, 2008).
"""

import numpy as np

ROWS, WIDE, NARROW = 8, 32, 16


def wide(
    c: np.ndarray, c_at: int, c_step: int, a: np.ndarray, a_at: int, a_row: int, a_col: int,
    b: np.ndarray, b_at: int, b_step: int, depth: int, add: bool,
) -> None:  # fmt: skip
    """Write the product of `depth` columns of A to 32 columns of C, or add it."""
    _product(c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add, WIDE)


def narrow(
    c: np.ndarray, c_at: int, c_step: int, a: np.ndarray, a_at: int, a_row: int, a_col: int,
    b: np.ndarray, b_at: int, b_step: int, depth: int, add: bool,
) -> None:  # fmt: skip
    """Write the product of `depth` columns of A to 16 columns of C, or add it."""
    _product(c, c_at, c_step, a, a_at, a_row, a_col, b, b_at, b_step, depth, add, NARROW)


def _product(
    c: np.ndarray, c_at: int, c_step: int, a: np.ndarray, a_at: int, a_row: int, a_col: int,
    b: np.ndarray, b_at: int, b_step: int, depth: int, add: bool, columns: int,
) -> None:  # fmt: skip
    for r in range(ROWS):
        for j in range(columns):
            total = c[c_at + r * c_step + j] if add else np.float32(0)
            for t in range(depth):
                total += a[a_at + r * a_row + t * a_col] * b[b_at + t * b_step + j]
            c[c_at + r * c_step + j] = total


def columns(
    c: np.ndarray, c_at: int, c_step: int, a: np.ndarray, a_at: int, a_row: int, a_col: int,
    b: np.ndarray, b_at: int, b_step: int, depth: int, add: bool, n: int,
) -> None:  # fmt: skip
    """Write or add the product to n columns of C, a multiple of 16."""
    whole = n - n % WIDE
    for j in range(0, whole, WIDE):
        wide(c, c_at + j, c_step, a, a_at, a_row, a_col, b, b_at + j, b_step, depth, add)
    if whole < n:
        at, on = c_at + whole, b_at + whole
        narrow(c, at, c_step, a, a_at, a_row, a_col, b, on, b_step, depth, add)
