"""What a pipeline schedule is: for each rank, its actions in order.

The model is cut into stages 0, 1, 2, ..; `placement` says which rank holds each.  One stage a rank,
or several (its chunks) as in interleaved schedules.  1F1B on 2 ranks, 3 micro-batches:

    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

There are no times in it: a rank starts its next action as soon as what the action needs is there.
For stage s and micro-batch k these are

    sFk   the output of stage s-1, computed by (s-1)Fk
    sBk   its own sFk, and the gradient of its output, computed by (s+1)Bk
    sWk   its own sBk

After `lower`, what comes from another rank needs a message, and the ranks' lists have its two ends
too.  A send is complete when its receive has been posted, and the rank goes on only then: this is
the strictest that an MPI library may do.  What ends under it ends under every other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mpipar.schedule.pipeline.action import SENDS, Action

Row = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """Which rank runs which stage for which micro-batch, in which order.

    `actions` has a row for each rank, `placement` the rank of each stage.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(map(self.placement.count, range(self.ranks)))

    @cached_property
    def split(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind == "W" for row in self.actions for action in row)

    @cached_property
    def lowered(self) -> bool:
        """Whether messages are among the actions."""
        return any(not action.computes for row in self.actions for action in row)

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def crosses(self, stage: int) -> bool:
        """Say whether stages `stage` and `stage + 1` both exist and are on different ranks."""
        at = self.placement
        return 0 <= stage < self.stages - 1 and at[stage] != at[stage + 1]

    def message(self, action: Action) -> tuple[Action, Action] | None:
        """Return the (send, receive) that carry what an F or B makes to another rank, or None."""
        stage, kind, microbatch = action
        border, target = (stage, stage + 1) if kind == "F" else (stage - 1, stage - 1)
        if kind == "W" or not self.crosses(border):
            return None
        send = Action(stage, f"SEND_{kind}", microbatch)
        return send, Action(target, f"RECV_{kind}", microbatch)

    def peer(self, action: Action) -> int:
        """Return the rank at the other end of a message."""
        up = action.kind in ("SEND_F", "RECV_B")
        return self.placement[action.stage + (1 if up else -1)]

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions, of any rank, that must have ended before this one can run."""
        stage, kind, microbatch = action
        if kind == "W":
            yield Action(stage, "B", microbatch)
        elif kind in SENDS:
            made = Action(stage, kind[-1], microbatch)
            yield made
            yield from (self.message(made) or ())[1:]
        elif kind in ("F", "B"):
            if kind == "B":
                yield Action(stage, "F", microbatch)
            source = Action(stage + (-1 if kind == "F" else 1), kind, microbatch)
            if 0 <= source.stage < self.stages:
                ends = self.message(source) if self.lowered else None
                yield from (source,) if ends is None else reversed(ends)

    def expected(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) of every action that the schedule must have, each once."""
        kinds = "FBW" if self.split else "FB"
        lowered = self.lowered
        for stage, rank in enumerate(self.placement):
            for microbatch in range(self.microbatches):
                for kind in kinds:
                    action = Action(stage, kind, microbatch)
                    yield rank, action
                    ends = self.message(action) if lowered else None
                    if ends is not None:
                        yield rank, ends[0]
                        yield self.placement[ends[1].stage], ends[1]

    def with_actions(self, actions: tuple[Row, ...]) -> "PipelineSchedule":
        """Return a copy in which the ranks have other actions."""
        return replace(self, actions=actions)

    def computation(self) -> "PipelineSchedule":
        """Return a copy without messages."""
        return self.with_actions(tuple(tuple(a for a in row if a.computes) for row in self.actions))

    def __str__(self) -> str:
        """Return a line for each rank: `0: 0F0 0F1 0B0 0B1`."""
        rows = (" ".join(map(str, row)) for row in self.actions)
        return "\n".join(f"{rank}: {row}" for rank, row in enumerate(rows))


def live(schedule: PipelineSchedule, rank: int) -> list[int]:
    """Return how many activations a rank holds during each of its actions.

    One is what a stage keeps of one micro-batch, from its forward pass to the last use: the
    backward pass, or the W where that is split.
    """
    last = "W" if schedule.split else "B"
    counts, held = [], 0
    for action in schedule.actions[rank]:
        held += action.kind == "F"
        counts.append(held)
        held -= action.kind == last
    return counts


def peak_live(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the most activations that each rank holds at a time (see `live`)."""
    return tuple(max(live(schedule, rank), default=0) for rank in range(schedule.ranks))
