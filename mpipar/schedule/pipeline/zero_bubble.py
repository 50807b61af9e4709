"""Zero-bubble schedules: the backward pass is split in two (Qi et al. 2023, Qi et al. 2024).

B computes the gradient of a stage's input, which the stage before waits for; W computes the
gradient of its weights, which nobody waits for until the optimiser's step.  So W fills the gaps.

zb1p (ZB-H1 there) is 1F1B with every W put off: rank r runs the W of micro-batch k after the B of
micro-batch k + r.  3 ranks, 6 micro-batches:

    rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5
    rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 F5 B4 W3 B5 W4 W5
    rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5

With equal times of F, B and W the idle share is (p-1)/(3m+p-1) for m >= 2p; every rank holds the
activations of at most p micro-batches, as the first rank of 1F1B does.

zbv gives rank r the two stages r and 2p-1-r: a V, down the ranks and back up, so that the last
stage is on the rank of the first.  With equal times and m >= 2p-1 the idle share is
(p-1)/(6m+p-1); each rank holds at most 2p activations, of stages half as large.
"""

from collections import Counter

from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import Row


def zb1p(p: int, m: int, rank: int) -> Row:
    """Return the actions of `rank`: 1F1B, and the W of k after the B of k + rank."""
    warm_up = min(p - 1 - rank, m)
    row = [Action(rank, "F", k) for k in range(warm_up)]
    for k in range(m):
        if warm_up + k < m:
            row.append(Action(rank, "F", warm_up + k))
        row.append(Action(rank, "B", k))
        if k >= rank:
            row.append(Action(rank, "W", k - rank))
    row += [Action(rank, "W", k) for k in range(max(0, m - rank), m)]
    return tuple(row)


def zbv(p: int, m: int, rank: int) -> Row:
    """Return the actions of `rank`, which holds the stages rank and 2p-1-rank.

    The pattern is that of 2p-1 micro-batches at least; the actions of those beyond m are left out.
    """
    total = max(m, 2 * p - 1)
    down, up = rank, 2 * p - 1 - rank
    turn = p - rank  # ranks from this one to the turn of the V, both included
    row: list[Action] = []
    count: Counter[tuple[int, str]] = Counter()

    def run(stage: int, kinds: str) -> None:
        for kind in kinds:
            if count[stage, kind] < total:
                row.append(Action(stage, kind, count[stage, kind]))
                count[stage, kind] += 1

    for _ in range(2 * turn - 1):
        run(down, "F")
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(turn):
        run(up, "FBW")
    while count[up, "F"] < total:
        run(down, "FBW")
        run(up, "FBW")
    for _ in range(rank):
        run(down, "B")
        run(up, "B")
    for _ in range(turn):
        run(down, "BW")
    run(up, "W" * total)
    run(down, "W" * total)
    return tuple(action for action in row if action.microbatch < m)
