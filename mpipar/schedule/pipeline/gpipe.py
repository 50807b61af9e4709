"""GPipe: all forward passes, then all backward passes (Huang et al. 2019).

    rank 0  F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 .  .  B0 B1 B2
    rank 2  .  .  F0 F1 F2 B0 B1 B2

Share of the time that ranks are idle: (p-1)/(m+p-1).  Every rank holds the activations of all m
micro-batches.  The backward passes run in the order of the forward ones, not in the paper's reverse
order: gradients are then added in the same order as in the other schedules.
"""

from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import Row


def gpipe(p: int, m: int, rank: int) -> Row:
    """Return the actions of `rank`: F of micro-batches 0..m-1, then their B."""
    return tuple(Action(rank, kind, k) for kind in "FB" for k in range(m))
