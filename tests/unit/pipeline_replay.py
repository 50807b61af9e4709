"""Runs a pipeline schedule on numbers: the oracle that its tests compare `verify` with.

Stage s multiplies by a weight, so everything is exact.  What is forwarded is x, its gradient g:

    F    x of stage s+1 = weight[s] * x of stage s
    B    g of stage s   = weight[s] * g of stage s+1
    W    gradient[s]   += x of stage s * g of stage s+1      (B does this too if there is no W)

Every value is used once and then gone.  Messages have no names here: the n-th receive that a rank
posts for another takes the n-th message from there, and a send waits for its receive.
"""

from collections import defaultdict

from mpipar.schedule.pipeline import Action, PipelineSchedule

WEIGHTS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


def replay(schedule: PipelineSchedule) -> list[int] | None:
    """Return the weight gradient of every stage, or None if the schedule stands still."""
    run = _Run(schedule)
    heads = [0] * schedule.ranks
    going = True
    while going:
        going = False
        for rank, row in enumerate(schedule.actions):
            while heads[rank] < len(row) and run.step(rank, row[heads[rank]]):
                heads[rank] += 1
                going = True
    ended = all(head == len(row) for head, row in zip(heads, schedule.actions, strict=True))
    left = any(run.posted.values()) or any(run.values)
    return run.gradients if ended and not left else None


def dense(stages: int, microbatches: int) -> list[int]:
    """Return the weight gradients of the whole model."""
    whole = 1
    for stage in range(stages):
        whole *= WEIGHTS[stage]
    total = sum(start(k) * slope(k) for k in range(microbatches))
    return [total * whole // WEIGHTS[stage] for stage in range(stages)]


def start(microbatch: int) -> int:
    """Return the input of the model."""
    return 100 + microbatch


def slope(microbatch: int) -> int:
    """Return the gradient of the loss with respect to the model's output."""
    return 1 + microbatch**2


class _Run:
    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule, self.split, self.lowered = schedule, schedule.split, schedule.lowered
        self.gradients = [0] * schedule.stages
        self.values: list[dict[tuple[str, int, int], int]] = [{} for _ in schedule.actions]
        self.posted = defaultdict[tuple[int, int], list[tuple[str, int, int]]](list)
        for k in range(schedule.microbatches):
            self.values[schedule.placement[0]]["x", 0, k] = start(k)
            self.values[schedule.placement[-1]]["g", schedule.stages, k] = slope(k)

    def step(self, rank: int, action: Action) -> bool:
        """Run one action if it can run; say whether it could."""
        stage, kind, k = action
        held = self.values[rank]
        if kind in ("RECV_F", "RECV_B"):
            key = ("x", stage, k) if kind == "RECV_F" else ("g", stage + 1, k)
            self.posted[self.schedule.peer(action), rank].append(key)
            return True
        if kind in ("SEND_F", "SEND_B"):
            peer = self.schedule.peer(action)
            key = ("out x", stage + 1, k) if kind == "SEND_F" else ("out g", stage, k)
            if key not in held or not self.posted[rank, peer]:
                return False
            self.values[peer][self.posted[rank, peer].pop(0)] = held.pop(key)
            return True
        needed = {"F": [("x", stage)], "B": [("kept", stage), ("g", stage + 1)]}
        needed["W"] = [("kept", stage), ("kept g", stage)]
        if any((name, s, k) not in held for name, s in needed[kind]):
            return False
        first, *second = (held.pop((name, s, k)) for name, s in needed[kind])
        if kind == "F":
            held["kept", stage, k] = first
            if stage + 1 < self.schedule.stages:
                self.pass_on("x", stage + 1, stage, k, first * WEIGHTS[stage])
        elif kind == "B":
            if stage > 0:
                self.pass_on("g", stage, stage, k, second[0] * WEIGHTS[stage])
            if self.split:
                held["kept", stage, k], held["kept g", stage, k] = first, second[0]
        if kind == "W" or (kind == "B" and not self.split):
            self.gradients[stage] += first * second[0]
        return True

    def pass_on(self, name: str, key: int, stage: int, k: int, value: int) -> None:
        """Give a result to the rank of the next stage, or make it ready to be sent there."""
        at = self.schedule.placement
        here, there = at[stage], at[stage + 1 if name == "x" else stage - 1]
        if self.lowered and here != there:
            self.values[here][f"out {name}", key, k] = value
        else:
            self.values[there][name, key, k] = value
