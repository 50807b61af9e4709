"""What CUDA kernels are started with, on the stand-in for CuPy: words, grids, streams."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpipar.arrays import dtype as dtype_of
from mpipar.bench.kernel_cases import Sizes, cases
from mpipar.kernels import device_cache
from mpipar.kernels.device import Kernel
from tests import fake_cupy

SMALL = Sizes(24, 16, 12, (1, 8, 2, 32), 24)
SHARED = 227 << 10  # of a block, bytes
MOST = (2**31 - 1, 65535, 65535)  # blocks along each side of a grid


def kernels() -> Iterator[tuple[str, Kernel]]:
    """All versions of all kernels, by label."""
    for module in device_cache.modules():
        names = vars(importlib.import_module(f"mpipar.kernels.{module}"))
        for one in (*names.values(), *names.get("KERNELS", ())):
            if isinstance(one, Kernel):
                yield from ((one.label(dtype), one) for dtype in one.dtypes)


def test_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = fake_cupy.make()
    started: list[tuple[Any, ...]] = []

    def function(label: str) -> Any:
        def start(*how: Any, shared_mem: int) -> None:
            started.append((label, shared_mem, cupy.cuda.get_current_stream(), *how))

        return start

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.RawModule = lambda path: SimpleNamespace(get_function=function)
    monkeypatch.setattr(device_cache, "compiled", lambda module, capability, label: label)
    known = dict(kernels())
    for kernel in known.values():
        monkeypatch.setattr(kernel, "_loaded", {})
    stream = cupy.cuda.Stream()
    monkeypatch.setattr(type(stream), "synchronize", lambda self: pytest.fail("it waits"))
    for case in cases(SMALL):
        for dtype in ("float32", "bfloat16"):
            inputs = [cupy.asarray(x) for x in case.arrays(dtype_of(dtype))]
            before = len(started)
            with stream:
                case.call(*inputs)
            assert len(started) > before, case.kernel
    for label, shared, where, grid, block, words in started:
        kernel = known[label]
        assert where is stream, label
        assert all(0 < size <= most for size, most in zip(grid, MOST, strict=True)), label
        assert np.prod(block) <= (kernel.threads or 256), label
        assert 0 <= shared <= SHARED, label
        kinds = kernel.kinds(next(d for d in kernel.dtypes if kernel.label(d) == label))
        rest = list(words)
        for kind in kinds:
            if kind.endswith("[]"):
                _, _, n, width, address, size, step = rest[:7]
                item = np.dtype(kind.removesuffix("[]")).itemsize
                assert (width, step, n) == (item, item, size), label
                assert address % item == 0, label
                rest = rest[7:]
            else:
                assert rest.pop(0).dtype == kind, label
        assert not rest, label
