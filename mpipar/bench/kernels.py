"""`mpipar bench kernels`: each kernel beside the least time that this machine could take for it.

The floor of a kernel is the largest of three times:

    bytes / copy rate      operations / rate of the best product      exponentials / rate of exp

The rates are measured in the same run, on one thread: a copy of an array of the size of the
kernels' own, a product of float32 matrices, and NumPy's exp on numbers in the cache.  ratio: the
median time over the floor.  A floor is no promise: nothing overlaps perfectly.

On a GPU: kernels_device.py.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpipar.bench.kernel_cases import DEVICE, HOST, Case, cases
from mpipar.bench.train_settings import operations
from mpipar.kernels.matmul.blas import product
from mpipar.kernels.native import compile_cpu
from mpipar.train import heap

SECONDS = 0.3  # for a kernel, and for a rate
SQUARE = (768, 768, 768)  # whose product has the best rate
CACHED = 1 << 14  # elements


@dataclass(frozen=True)
class Rates:
    """What a device can do in a second."""

    copy: float  # bytes read and written
    product: float  # floating-point operations
    exponential: float  # elements


@dataclass(frozen=True)
class Row:
    """One kernel, as it is written to JSON."""

    kernel: str
    device: str
    dtype: str
    shape: list[int]
    median_s: float
    floor_s: float
    ratio: float
    ns_per_element: float
    gflops: float | None
    bound: str  # what the floor is of: "bytes", "operations" or "exponentials"
    bytes_floor_s: float
    operations_floor_s: float
    plain_s: float | None = None  # the array module's own way
    of_plain: float | None = None  # its time over ours: 1 is as fast


def names(device: str = "cpu") -> list[str]:
    """Return the kernels that can be timed there."""
    return [case.kernel for case in cases(HOST if device == "cpu" else DEVICE)]


def measure(
    only: Sequence[str] = (),
    seconds: float = SECONDS,
    say: Callable[[Row], None] = lambda row: None,
) -> tuple[Rates, list[Row]]:
    """Return the rates of this machine and the rows of the kernels named, all if none is.

    seconds: for each.  say: is called with each row when it is there.
    """
    heap.keep_freed()  # as in training
    compile_cpu()
    rates, rows = rates_of_host(seconds), []
    for case in cases():
        if not only or case.kernel in only:
            inputs = case.arrays()
            taken = median(lambda: case.call(*inputs), seconds)  # noqa: B023 (called at once)
            row = row_of(case, "cpu", np.dtype(np.float32), taken, rates)
            say(row)
            rows.append(row)
    return rates, rows


def row_of(
    case: Case, device: str, dtype: np.dtype, median_s: float, rates: Rates,
    plain_s: float | None = None,
) -> Row:  # fmt: skip
    """Return the row of a case that took `median_s` on a device with these rates."""
    floors = {
        "bytes": case.bytes(dtype) / rates.copy,
        "operations": case.operations / rates.product,
        "exponentials": case.exponentials / rates.exponential,
    }
    bound = max(floors, key=lambda name: floors[name])
    return Row(
        kernel=case.kernel,
        device=device,
        dtype=dtype.name,
        shape=list(case.shape),
        median_s=median_s,
        floor_s=floors[bound],
        ratio=median_s / floors[bound],
        ns_per_element=median_s / case.elements * 1e9,
        gflops=case.operations / median_s / 1e9 if case.operations else None,
        bound=bound,
        bytes_floor_s=floors["bytes"],
        operations_floor_s=floors["operations"],
        plain_s=plain_s,
        of_plain=None if plain_s is None else plain_s / median_s,
    )


def rates_of_host(seconds: float = SECONDS) -> Rates:
    """Measure one thread of this machine; of the best of each, as a floor is the least time."""
    x = np.ones((HOST.tokens, HOST.width), np.float32)
    y = x.copy()
    a, b = (np.ones(shape, np.float32) for shape in (SQUARE[:2], SQUARE[1:]))
    c = a @ b
    small = np.linspace(-2, 2, CACHED, dtype=np.float32)
    result = np.empty_like(small)
    return Rates(
        copy=2 * x.nbytes / min(times(lambda: np.copyto(y, x), seconds)),
        product=operations(SQUARE) / min(times(lambda: product(a, b, c), seconds)),
        exponential=CACHED / min(times(lambda: np.exp(small, out=result), seconds)),
    )


def median(call: Callable[[], Any], seconds: float) -> float:
    """Return the median seconds of a call."""
    return statistics.median(times(call, seconds))


def times(call: Callable[[], Any], seconds: float) -> list[float]:
    """Call again and again for a while, three times at least; the first call does not count."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as plain dicts."""
    return [asdict(row) for row in rows]
