"""Interleaved 1F1B: every rank holds v stages, p apart (Narayanan et al. 2021, section 2.2).

Rank r holds stages r, r+p, .., so a micro-batch passes every rank v times, and the pipeline fills v
times sooner: with stages of 1/v of the size the idle share is (p-1)/(v m+p-1) where p divides m.

Micro-batches go in groups: a group passes chunk 0 of a rank, then chunk 1, .., then the next group.
2 ranks, 2 chunks, 4 micro-batches, order of the forward passes on rank 0 (backward: stage 2 first):

    0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3

A group must have p micro-batches for a rank to come back to the first one just when it returns from
the last rank.  If p does not divide m, there are m // p groups, of p to 2p-1 micro-batches, the
larger first; with m < p there is one group.  The warm-up is counted by the first group, hence long
enough for the others.
"""

from collections.abc import Iterator

from mpipar.partition import blocks, offsets
from mpipar.schedule.pipeline.action import Action
from mpipar.schedule.pipeline.core import Row


def interleaved(p: int, m: int, rank: int, chunks: int) -> Row:
    """Return the actions of `rank`, which holds `chunks` stages: rank, rank + p, .."""
    groups = blocks(m, max(1, m // p))
    stages = range(rank, p * chunks, p)
    forward = list(_passes("F", groups, stages))
    backward = list(_passes("B", groups, stages[::-1]))
    warm_up = min(2 * (p - 1 - rank) + (chunks - 1) * groups[0], len(forward))
    row = forward[:warm_up]
    for i, action in enumerate(backward):
        row += forward[warm_up + i : warm_up + i + 1]
        row.append(action)
    return tuple(row)


def _passes(kind: str, groups: tuple[int, ...], stages: range) -> Iterator[Action]:
    for first, size in zip(offsets(groups), groups, strict=True):
        for stage in stages:
            yield from (Action(stage, kind, k) for k in range(first, first + size))
