"""CUDA kernels on a real GPU: the simulator's cases on bigger, uneven shapes, and how they start.

python -m pytest tests/gpu/test_kernels.py
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

from mpipar.bench.kernel_cases import Case, Sizes, cases
from tests.fake_cupy.arrays import array_module
from tests.gpu.needs import cupy_or_skip

OPERATIONS = sorted(file.stem for file in (Path(__file__).parents[1] / "cuda").glob("cases_*.py"))
SMALL = cases(Sizes(48, 96, 80, (1, 40, 4, 32), 64))
SORTING = "embedding backward"  # CuPy's sort may wait


@pytest.mark.time_limit(300)  # the first case of a module waits for its compiler
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_equal_their_references(operation: str) -> None:
    importlib.import_module(f"tests.cuda.{operation}").run(cupy_or_skip(), "large")


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.kernel)
def test_starting_a_kernel_waits_for_nothing(case: Case) -> None:
    """What a stream captures may not wait for it, and is done when the graph runs, not before."""
    cupy: Any = cupy_or_skip()
    if case.kernel.startswith(SORTING):
        pytest.skip("it sorts by CuPy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = [cupy.asarray(x) for x in case.arrays()]
        copies = [x.copy() for x in inputs]
        wanted = [x.get() for x in arrays(case.call(*copies)) or copies]
        stream.begin_capture()
        made = arrays(case.call(*inputs))
        graph = stream.end_capture()
        for x in made:
            x.view("uint8").fill(0xEE)
        graph.launch(stream)
        got = [x.get() for x in made or inputs]
    assert [x.tobytes() for x in got] == [x.tobytes() for x in wanted]


def test_the_stand_in_has_nothing_that_cupy_has_not() -> None:
    cupy: Any = cupy_or_skip()
    assert [name for name in array_module() if not hasattr(cupy, name)] == []


def arrays(result: Any) -> list[Any]:
    """Return the arrays that a call has made: none if it works in place."""
    if isinstance(result, tuple):
        return [x for one in result for x in arrays(one)]
    return [] if result is None else [result]
