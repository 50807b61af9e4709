"""1F1B: a rank runs backward passes as early as it can (PipeDream-flush, Narayanan et al. 2021).

    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

Rank r begins with the p-1-r forward passes that the later ranks need before the first gradient
comes back, then alternates, then runs the backward passes that are left.  Idle share (p-1)/(m+p-1)
as in GPipe, but rank r holds the activations of min(p-r, m) micro-batches only.
"""

from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import Row


def one_f_one_b(p: int, m: int, rank: int) -> Row:
    """Return the actions of `rank`: min(p-1-rank, m) times F, then F and B in turn, then B."""
    warm_up = min(p - 1 - rank, m)
    row = [Action(rank, "F", k) for k in range(warm_up)]
    for k in range(m):
        if warm_up + k < m:
            row.append(Action(rank, "F", warm_up + k))
        row.append(Action(rank, "B", k))
    return tuple(row)
