"""Pictures, as text for a terminal or as SVG: of schedules, and of a Timeline.

    draw(make("all_reduce", "ring", 4))     arrows between the ranks
    draw(pipeline.make("1f1b", 4, 8))       what each rank does in each slot of time
    draw(simulate(schedule, 1e6).timeline, format="svg")    a Gantt chart

A Timeline may be simulated or measured; both look the same.
"""

from typing import Literal

from mpipar.errors import ConfigError, explain
from mpipar.schedule import draw_schedule, draw_timeline
from mpipar.schedule.core import CommSchedule
from mpipar.schedule.pipeline import PipelineSchedule
from mpipar.schedule.pipeline import draw as draw_pipeline
from mpipar.trace import Timeline


def draw(
    what: CommSchedule | PipelineSchedule | Timeline,
    format: Literal["text", "svg"] = "text",
    width: int = 96,
    title: str = "",
) -> str:
    """Return a picture of a schedule or a Timeline.

    `width` is the longest line of a text, in characters; `title` heads the SVG of a Timeline.
    Raises ConfigError for another format, ScheduleError for a schedule whose sends and receives
    do not meet.
    """
    if format not in ("text", "svg"):
        raise ConfigError(explain("format", format, "it is text or svg", "Choose one of them"))
    if isinstance(what, PipelineSchedule):
        return draw_pipeline(what, format, width)
    if isinstance(what, CommSchedule):
        return draw_schedule.text(what, width) if format == "text" else draw_schedule.svg(what)
    if format == "text":
        return draw_timeline.text(what, width)
    return draw_timeline.svg(what, title)
