"""`mpipar bench overhead`: what the tape costs an operation, and what `import mpipar` costs.

The tape: a chain of additions and multiplications of 1-element tensors, forward and backward,
less the NumPy calls that do the same arithmetic without a tape.  The import: seconds over those of
numpy and mpi4py, in fresh interpreters.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

LENGTH = 1000  # operations in the chain


def tape_seconds(repeats: int = 15) -> tuple[float, float]:
    """Return (tape, plain): median CPU seconds an operation with the tape, and in NumPy alone."""
    from mpipar.autograd import Tensor

    x = Tensor(np.ones(1), requires_grad=True)
    factor = Tensor(np.ones(1))

    def taped() -> None:
        y = x
        for _ in range(LENGTH // 2):
            y = y * factor
            y = y + factor
        y.backward(np.ones(1))

    def plain() -> None:
        y, ones = x.data, factor.data
        for _ in range(LENGTH // 2):
            y = np.multiply(y, ones)
            y = np.add(y, ones)
        grad = np.ones(1)
        for _ in range(LENGTH // 2):  # the vjp of + passes the gradient, that of * multiplies
            grad = np.multiply(grad, ones)

    return _median(taped, repeats) / LENGTH, _median(plain, repeats) / LENGTH


def import_seconds(repeats: int = 7) -> tuple[float, float]:
    """Return (mpipar, base): median seconds to import mpipar, and numpy and mpi4py alone."""
    base = "import numpy, mpi4py"
    pair: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for times, code in zip(pair, (f"{base}, mpipar", base), strict=True):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
    return statistics.median(pair[0]), statistics.median(pair[1])


def _median(call: Callable[[], None], repeats: int) -> float:
    """Median CPU seconds of this process: other jobs on the machine do not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)
