"""Pipeline schedules as data: which rank runs which stage for which micro-batch, in which order.

schedule = make("1f1b", 4, 8)             gpipe, 1f1b, interleaved, zb1p, zbv; or load(path)
verify(schedule)                          every action once, no deadlock, memory
lower(schedule)                           with sends and receives
simulate(schedule, forward=1e-3).bubble   makespan, idle share, activations, Timeline
print(draw(schedule))                     the familiar picture
"""

from mpipar.schedule.pipeline.action import COMPUTE, Action, parse_action, parse_actions
from mpipar.schedule.pipeline.core import PipelineSchedule, Row, live, peak_live
from mpipar.schedule.pipeline.draw import draw
from mpipar.schedule.pipeline.lower import lower
from mpipar.schedule.pipeline.registry import PIPELINES, Pipeline, make, pipelines, resolve
from mpipar.schedule.pipeline.simulate import PipelineResult, idle, simulate, span
from mpipar.schedule.pipeline.slots import Slots, slots
from mpipar.schedule.pipeline.table import from_csv, load, to_csv
from mpipar.schedule.pipeline.verify import verify

__all__ = [
    "COMPUTE",
    "PIPELINES",
    "Action",
    "Pipeline",
    "PipelineResult",
    "PipelineSchedule",
    "Row",
    "Slots",
    "draw",
    "from_csv",
    "idle",
    "live",
    "load",
    "lower",
    "make",
    "parse_action",
    "parse_actions",
    "peak_live",
    "pipelines",
    "resolve",
    "simulate",
    "slots",
    "span",
    "to_csv",
    "verify",
]
