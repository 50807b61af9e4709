"""The speed of matrix products on this machine, which MFU is a share of.

MFU, model FLOPs utilisation: the operations that the model's forward and backward need, over what
the machine could have done in that time (Chowdhery et al., PaLM, 2022, appendix B).  All ranks
measure together, each with the threads it trains with, because on oversubscribed cores a rank on
its own would see a speed that it never has in training.  A machine that was busy at first would
make the share too large, so they measure again with every validation, and the best counts.
"""

import time
from functools import cache
from statistics import median

import numpy as np

from mpipar.arrays import compute_dtype
from mpipar.arrays import dtype as as_dtype
from mpipar.kernels.matmul.blas import product

SIZE = 512
SLICES, AGAIN = 8, 2  # before the first step, and with a validation
SECONDS = 0.025  # of a slice: long enough for ranks that share a core to take turns


@cache
def matmul_rate(dtype: str) -> float:
    """Return this rank's floating-point operations a second in matrix products of `dtype`.

    The middle one of several slices of time, 0.2 s in all, the first time in a process; the ranks
    should call it together.
    """
    return _middle(dtype, SLICES)


def matmul_rate_now(dtype: str) -> float:
    """Return the same as it is now, from fewer slices, 0.05 s in all."""
    return _middle(dtype, AGAIN)


def _middle(dtype: str, slices: int) -> float:
    """Return the rate of the middle one of some slices of time."""
    a = np.ones((SIZE, SIZE), compute_dtype(as_dtype(dtype)))
    out = np.empty_like(a)
    product(a, a, out)  # wakes up the library
    return median(_rate(a, out) for _ in range(slices))


def _rate(a: np.ndarray, out: np.ndarray) -> float:
    """Return the operations a second of one slice of time."""
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS:
        product(a, a, out)
        done += 1
    return 2.0 * SIZE**3 * done / elapsed
