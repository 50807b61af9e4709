"""When this rank ran what: spans like those of a simulated schedule, for the same picture.

    timeline = pipeline.gather_timeline()
    print(mpipar.schedule.draw(timeline))
    predicted = schedule.pipeline.simulate(schedule, measured=measured(timeline))

A span is the computation of an action alone: waiting for messages lies between spans.  What a rank
spends on posting messages is timed too, and gathered by `gather(messages=True)`.  The clock
of each rank starts when the ranks have agreed on the step, which is the same moment but for the
latency of a small message.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from mpipar.parallel.communicator import Communicator
from mpipar.schedule.pipeline import Action, parse_action, span
from mpipar.schedule.pipeline.action import KINDS
from mpipar.trace import Timeline, record
from mpipar.trace.record import Channel


@dataclass
class Recorder:
    """The actions of this rank in the latest step, messages too, and their times in seconds."""

    channel: Channel  # the communicator, for a trace
    actions: list[Action] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    origin: float = 0.0

    def begin(self) -> None:
        """Start the clock of a step."""
        self.actions, self.times = [], []
        self.origin = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since then."""
        return time.perf_counter() - self.origin

    def add(self, action: Action, start: float) -> None:
        """Note an action that ends now."""
        stop = self.now()
        self.actions.append(action)
        self.times.append((start, stop))
        if record.to is not None and action.computes:
            times = self.origin + start, self.origin + stop
            record.to.action(self.channel, str(action), *times)

    def gather(self, comm: Communicator, messages: bool = False) -> Timeline:
        """Collective: return the spans of all ranks; those of posting messages if asked for."""
        rows = np.array(
            [
                (comm.rank, action.stage, KINDS.index(action.kind), action.microbatch, *times)
                for action, times in zip(self.actions, self.times, strict=True)
                if messages or action.computes
            ],
            np.float64,
        ).reshape(-1, 6)
        if comm.size > 1:
            rows = comm.all_gather(rows, dim=0, sizes="exchange")
        timeline = Timeline()
        for rank, stage, kind, k, start, stop in rows.tolist():
            action = Action(int(stage), KINDS[int(kind)], int(k))
            timeline.add(span(int(rank), action, start, stop))
        return timeline


def measured(timeline: Timeline) -> dict[Action, float]:
    """Return the seconds of every action of a timeline, for `simulate`."""
    return {parse_action(one.name): one.stop - one.start for one in timeline.spans}
