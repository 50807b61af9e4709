"""Run a schedule in steps of equal length: every action takes one slot.

In each slot every rank runs its next action if all that it needs ended in earlier slots, and is
idle otherwise.  1F1B on 2 ranks, 2 micro-batches:

    slot    0   1   2   3   4   5
    rank 0  0F0 0F1  .  0B0  .  0B1
    rank 1   .  1F0 1B0 1F1 1B1

This gives the familiar picture, an order in which every action follows what it needs, and the
place where a wrong schedule stands still.  Whether a schedule ends does not depend on how long its
actions take, since each waits for particular others and none chooses.
"""

from dataclasses import dataclass

from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import PipelineSchedule


@dataclass(frozen=True)
class Slots:
    """What each rank does in each slot (None: it waits), and how many of its actions it ended."""

    rows: tuple[tuple[Action | None, ...], ...]
    ended: tuple[int, ...]
    stuck: bool

    @property
    def count(self) -> int:
        """The number of slots from the first action to the last."""
        return max(map(len, self.rows), default=0)

    def in_order(self) -> list[tuple[int, Action]]:
        """Return (rank, action) of all, each after what it needs."""
        found = []
        for slot in range(self.count):
            for rank, row in enumerate(self.rows):
                action = row[slot] if slot < len(row) else None
                if action is not None:
                    found.append((rank, action))
        return found


def slots(schedule: PipelineSchedule) -> Slots:
    """Run the schedule to its end, or to where no rank can go on."""
    done: set[Action] = set()
    rows: list[list[Action | None]] = [[] for _ in schedule.actions]
    heads = [0] * schedule.ranks
    needs = [[tuple(schedule.needs(action)) for action in row] for row in schedule.actions]
    going = True
    while going:
        ran: list[Action] = []
        for rank, actions in enumerate(schedule.actions):
            head = heads[rank]
            if head == len(actions):
                continue
            free = done.issuperset(needs[rank][head])
            rows[rank].append(actions[head] if free else None)
            if free:
                ran.append(actions[head])
                heads[rank] += 1
        done.update(ran)
        going = bool(ran)
    stuck = any(head < len(row) for head, row in zip(heads, schedule.actions, strict=True))
    if stuck:
        for row in rows:
            while row and row[-1] is None:
                row.pop()
    return Slots(tuple(map(tuple, rows)), tuple(heads), stuck)
