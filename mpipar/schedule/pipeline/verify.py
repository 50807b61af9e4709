"""Prove a pipeline schedule right, or show the cell where it is wrong.

Checked: every action is there once, on the rank that holds its stage; no rank waits for ever,
which includes that F comes before B before W and that every stage follows its neighbours; and, if
asked for, that no rank holds more activations than there is memory for.  Of a lowered schedule:
every message has both its ends, each receive is posted before the action that it is for, nothing
deadlocks though every send waits for its receive, and both ends list their messages alike.

A fault is shown in the table of the ranks' actions, the cell in brackets:

    rank 0 | 0F0   0F1  [0B1]  0B0
    rank 1 | 1F0   1B0  [1F1]  1B1
"""

from mpipar.errors import ScheduleError, explain
from mpipar.schedule.pipeline.action import KINDS, RECEIVES, SENDS, Action
from mpipar.schedule.pipeline.core import PipelineSchedule, live
from mpipar.schedule.pipeline.slots import Slots, slots
from mpipar.schedule.pipeline.table import Cell, marked

PARTNER = {"F": "B", "B": "F", "W": "B"}  # the cell to mark where an action is missing


def verify(schedule: PipelineSchedule, memory: int | None = None) -> Slots:
    """Check that the schedule is correct; return how it runs in equal slots.

    With `memory`, also check that no rank ever holds the activations of more stages and
    micro-batches than that (see `live`).

    Raises ScheduleError with the table, the cell at fault in brackets.
    """
    at = _each_once(schedule)
    ran = slots(schedule)
    if ran.stuck:
        raise _standstill(schedule, ran, at)
    if schedule.lowered:
        _same_order(schedule, at)
    if memory is not None:
        _fits(schedule, memory)
    return ran


def _fault(schedule: PipelineSchedule, what: str, fix: str, cells: list[Cell]) -> ScheduleError:
    text = explain("schedule", schedule.name, what, fix)
    return ScheduleError(f"{text}\n{marked(schedule, cells)}")


def _each_once(schedule: PipelineSchedule) -> dict[Action, Cell]:
    """Return the cell (rank, place) of every action, each on the right rank and there once."""
    at: dict[Action, Cell] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            cell = (rank, place)
            stage, kind, microbatch = action
            if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
                what = (
                    f"{action} on rank {rank} is not of the {schedule.stages} stages and "
                    f"{schedule.microbatches} micro-batches"
                )
                raise _fault(schedule, what, "Leave it out", [cell])
            if kind not in KINDS:
                what = f"{action} on rank {rank} is of no kind that there is: {' '.join(KINDS)}"
                raise _fault(schedule, what, "Leave it out", [cell])
            if schedule.placement[stage] != rank:
                holder = schedule.placement[stage]
                what = f"{action} is on rank {rank}, but rank {holder} holds stage {stage}"
                raise _fault(schedule, what, f"Move it to rank {holder}", [cell])
            if action in at:
                what = f"{action} is doubled on rank {rank}, in places {at[action][1]} and {place}"
                raise _fault(schedule, what, "Keep one of them", [at[action], cell])
            at[action] = cell
    _complete(schedule, at)
    return at


def _complete(schedule: PipelineSchedule, at: dict[Action, Cell]) -> None:
    """Check that no action is missing, and that none is there that nobody expects."""
    expected: set[Action] = set()
    for rank, action in schedule.expected():
        expected.add(action)
        if action not in at:
            stage, kind, microbatch = action
            partner = Action(stage, PARTNER.get(kind, kind[-1]), microbatch)
            cells = [at[partner]] if partner in at else []
            what = f"{action} is missing on rank {rank}"
            raise _fault(schedule, what, f"Add it to rank {rank}", cells)
    for action, cell in at.items():
        if action not in expected:
            what = f"{action} on rank {cell[0]} has no other end: its neighbour is on that rank"
            raise _fault(schedule, what, "Leave it out", [cell])


def _standstill(schedule: PipelineSchedule, ran: Slots, at: dict[Action, Cell]) -> ScheduleError:
    """Say who waits for whom, round a circle; the cells of the circle are marked."""
    heads = {
        rank: row[ran.ended[rank]]
        for rank, row in enumerate(schedule.actions)
        if ran.ended[rank] < len(row)
    }

    def awaited(rank: int) -> Action:
        """Return what the next action of a stuck rank waits for."""
        needed = schedule.needs(heads[rank])
        return next(a for a in needed if at[a][1] >= ran.ended[at[a][0]])

    rank, path = min(heads), list[int]()
    while rank not in path:
        path.append(rank)
        rank = at[awaited(rank)][0]
    circle = path[path.index(rank) :]
    waits = []
    for rank in circle:
        wanted = awaited(rank)
        holder = at[wanted][0]
        behind = f"behind {heads[holder]}" if wanted != heads[holder] else "next"
        who = f"rank {holder}{' itself' if holder == rank else ''}"
        waits.append(f"rank {rank} waits at {heads[rank]} for {wanted}, which {who} has {behind}")
    sends = " with synchronous sends" if schedule.lowered else ""
    what = f"deadlock{sends}: {'; '.join(waits)}"
    fix = "Put every action behind what it needs"
    return _fault(schedule, what, fix, [(rank, ran.ended[rank]) for rank in circle])


def _same_order(schedule: PipelineSchedule, at: dict[Action, Cell]) -> None:
    """Check that messages from one rank to another are listed in the same order at both ends."""
    receives: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in RECEIVES:
                receives.setdefault((schedule.peer(action), rank), []).append(action)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS:
                peer = schedule.peer(action)
                first = receives[rank, peer].pop(0)
                made = schedule.message(Action(action.stage, action.kind[-1], action.microbatch))
                if made is None or made[1] != first:
                    what = f"rank {rank} sends {action} where rank {peer} expects {first}"
                    fix = "List messages between two ranks in the same order at both ends"
                    raise _fault(schedule, what, fix, [at[action], at[first]])


def _fits(schedule: PipelineSchedule, memory: int) -> None:
    for rank in range(schedule.ranks):
        counts = live(schedule, rank)
        place = next((i for i, count in enumerate(counts) if count > memory), None)
        if place is not None:
            what = (
                f"rank {rank} holds {counts[place]} activations at "
                f"{schedule.actions[rank][place]}, and {memory} fit"
            )
            fix = "Run backward passes earlier, or allow more memory"
            raise _fault(schedule, what, fix, [(rank, place)])
