"""`mpipar train --trace DIR`: what the ranks do in each step, recorded by mpipar.Trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mpipar.parallel.mesh import AXES, Mesh
from mpipar.parallel.trace import Trace
from mpipar.train.agree import together
from mpipar.train.config import TrainConfig
from mpipar.train.report import Report

Step = Callable[[int], AbstractContextManager[None]]


def untraced(step: int) -> AbstractContextManager[None]:
    """Stand for the context of a step where nothing is recorded."""
    return nullcontext()


@contextmanager
def traced(config: TrainConfig, mesh: Mesh, report: Report) -> Iterator[Step]:
    """Collective: record the block, if that is asked for; yields what each step is entered by.

    Raises ConfigError on every rank if the files cannot be written.
    """
    if config.trace is None:
        yield untraced
        return
    world, folder = mesh.world.process_group.raw, config.trace
    axes = [axis for axis in AXES if mesh.axis_size(axis) > 1]
    place = ", ".join(f"{axis} {getattr(mesh.coords, axis)}" for axis in axes)
    how = config.traced_steps, place
    with together(world, lambda: Trace(folder, mesh.world, *how)) as trace:
        yield trace.step
        together(world, trace.close)
    together(world, lambda: report.traced(str(trace.path), trace.summary))
