"""`mpipar bench kernels --device cuda`: each CUDA kernel beside what the GPU and CuPy could do.

    stream   | filler | event  kernel  event |

A filler, a copy that takes longer than Python needs to start a kernel, goes before each
measurement: when the GPU comes to the first event, all that is timed waits already, so the time
between the events is the GPU's.

Floors: bytes over the rate of a copy, operations over the rate of CuPy's (cuBLAS's) product of the
same number type; both are measured in the same run.  Exponentials are counted as free.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipar.arrays import dtype as dtype_of
from mpipar.arrays import module
from mpipar.bench import kernel_cases
from mpipar.bench.kernel_cases import Case, cases
from mpipar.bench.kernels import Rates, Row, row_of
from mpipar.bench.train_settings import operations
from mpipar.comm.device import use_gpu
from mpipar.kernels import device_cache

DTYPES = ("float32", "bfloat16")
MOST = 200  # measurements of a kernel
PLAIN_16 = ("matmul", "permute (0, 2, 1, 3)", "transpose", "embedding")


def measure(
    only: Sequence[str] = (), seconds: float = 0.3, say: Callable[[Row], None] = lambda row: None
) -> tuple[dict[str, Rates], list[Row]]:
    """Return the rates of the GPU by number type, and the rows of the kernels named, or of all.

    seconds: of the GPU's, at most, for each.  Raises ConfigError without CuPy or a GPU.
    """
    xp: Any = module("cuda")
    use_gpu(0)
    device_cache.compile_cuda(xp.cuda.Device().compute_capability)
    clock = Clock(xp, seconds)
    copied, rows = clock.copy_rate(), []
    rates = {name: Rates(copied, clock.product_rate(name), float("inf")) for name in DTYPES}
    for case in cases(kernel_cases.DEVICE):
        if not only or case.kernel in only:
            for name in DTYPES:
                row = _row(case, name, rates[name], clock)
                say(row)
                rows.append(row)
    return rates, rows


def _row(case: Case, name: str, rates: Rates, clock: "Clock") -> Row:
    """Time one case, and CuPy's own way where it has one: in 16 bits only of what does no sums."""
    kind = dtype_of(name)
    inputs = [clock.xp.asarray(x) for x in case.arrays(kind)]
    taken = clock.median(lambda: case.call(*inputs))
    plain, plain_s = case.plain, None
    if plain is not None and (name == "float32" or case.kernel in PLAIN_16):
        plain_s = clock.median(lambda: plain(*inputs))
    return row_of(case, "cuda", kind, taken, rates, plain_s)


class Clock:
    """Times what is started on CuPy's current stream."""

    def __init__(self, xp: Any, seconds: float) -> None:
        self.xp, self.seconds = xp, seconds
        self.source = xp.zeros(max(1, kernel_cases.DEVICE.filler // 4), np.float32)
        self.target = xp.empty_like(self.source)

    def median(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a call; the first does not count."""
        return statistics.median(self.times(call))

    def times(self, call: Callable[[], Any]) -> list[float]:
        """Call again and again, three times at least."""
        call()
        found: list[float] = []
        while len(found) < 3 or (len(found) < MOST and sum(found) < self.seconds):
            found.append(self._once(call))
        return found

    def _once(self, call: Callable[[], Any]) -> float:
        events = self.xp.cuda.Event(), self.xp.cuda.Event()
        self.xp.copyto(self.target, self.source)
        events[0].record()
        call()
        events[1].record()
        events[1].synchronize()
        return float(self.xp.cuda.get_elapsed_time(*events)) / 1e3

    def copy_rate(self) -> float:
        """Return bytes read and written in a second by a copy, the best one."""
        best = min(self.times(lambda: self.xp.copyto(self.target, self.source)))
        return 2 * self.source.nbytes / best

    def product_rate(self, name: str) -> float:
        """Return operations in a second of the best product of square matrices."""
        n, xp = kernel_cases.DEVICE.product, self.xp
        a, b = (xp.asarray(np.ones((n, n), dtype_of(name))) for _ in range(2))
        return operations((n, n, n)) / min(self.times(lambda: xp.matmul(a, b)))
