"""Which token goes to which expert, and so to which rank: plain integers, no gradients.

4 tokens a rank on 2 ranks, 4 experts (0 1 on rank 0, 2 3 on rank 1), k = 1:

    choice   rank 0: 2 0 0 3   rank 1: 0 2 2 1         numbers of tokens for experts 0 1 2 3
    rows     rank 0: t1 t2 | t0 t3                      rank 0: 2 0 1 1
             rank 1: t0 t3 | t1 t2                      rank 1: 1 1 2 0

One all_gather tells every rank these numbers: how many rows come and go, how many tokens there are
in all, and, with a capacity, which are too many.  An expert takes the first of its tokens in GLOBAL
order, which is the order of the ranks (the sums of the numbers of lower ranks decide), or that of
the `index` given; then the indices and choices of all tokens are gathered too.  So the layout never
changes which token is dropped.  GShard (Lepikhin et al., 2020), section 2.2; Switch Transformers
(Fedus et al., 2021), section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, beside, module_of
from mpipar.comm import collectives
from mpipar.kernels.embedding import gather
from mpipar.parallel.communicator import Communicator


def choose(scores: Array, k: int) -> Array:
    """Return the k experts of the highest scores (T, E), highest first: (T, k).

    Of equal ones the expert with the lower number comes first.
    """
    return module_of(scores).argsort(-scores, axis=1, kind="stable")[:, :k]


@dataclass(frozen=True, eq=False)
class Plan:
    """The way of this rank's tokens to the experts and back.

    sent: the choice of each row that is sent, counted through all tokens, in the order of the
    experts; tokens: its token.  places: where, among these rows, each token's choices are (T, k);
    -1 where the expert was full.  counts[i][j]: rows from rank i to rank j.  order: the places of
    the rows that came, in the order of the experts; back: where in that order each of them is.
    sizes: how many came for each expert of this rank.  The arrays are integers that live where the
    tokens do.
    """

    comm: Communicator
    sent: Array
    tokens: Array
    places: Array
    counts: tuple[tuple[int, ...], ...]
    order: Array
    back: Array
    sizes: tuple[int, ...]

    def to_experts(self, rows: Array) -> Array:
        """Send the rows, in the order of the experts; return those for this rank's experts."""
        if self.comm.size > 1:
            rows = collectives.exchange(self.comm.process_group, rows, self.counts)
        return gather(rows, self.order)

    def to_tokens(self, rows: Array) -> Array:
        """Send back what the experts made; return it in the order in which tokens were sent."""
        came = gather(rows, self.back)
        if self.comm.size == 1:
            return came
        back = tuple(zip(*self.counts, strict=True))
        return collectives.exchange(self.comm.process_group, came, back)


def make_plan(choice: Array, keep: Array | None, kept: np.ndarray, comm: Communicator) -> Plan:
    """Return the plan for the choices (T, k) that are kept (T, k, bool; None: all).

    kept: how many choices of each expert (E) every rank of `comm` keeps, on the host: (p, E).
    """
    xp, experts = module_of(choice), choice.reshape(-1)
    sent = xp.argsort(experts, kind="stable")  # by expert, then by token
    if keep is not None:
        sent = sent[keep.reshape(-1)[sent]]
    places = xp.full(choice.size, -1, np.int64)
    places[sent] = xp.arange(len(sent))
    cuts = [partition.block(kept.shape[1], comm.size, rank) for rank in range(comm.size)]
    counts = tuple(tuple(int(row[cut].sum()) for cut in cuts) for row in kept)
    mine = kept[:, cuts[comm.rank]]  # (p, experts of this rank)
    labels = np.concatenate([np.repeat(np.arange(mine.shape[1]), row) for row in mine])
    order = np.argsort(labels, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return Plan(
        comm,
        sent,
        sent // max(choice.shape[1], 1),
        places.reshape(choice.shape),
        counts,
        beside(order, choice),
        beside(back, choice),
        tuple(mine.sum(0).tolist()),
    )


def within_capacity(
    choice: np.ndarray, counts: np.ndarray, capacity: int, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return which choices (T, k) are kept, and how many every rank keeps for each expert (p, E).

    The global order is that of the ranks.  counts (p, E): how many choose each expert.
    """
    before = np.cumsum(counts, axis=0) - counts  # of lower ranks
    kept = np.clip(capacity - before, 0, counts)
    return queue_places(choice.reshape(-1)).reshape(choice.shape) < kept[rank][choice], kept


def within_capacity_by_index(
    choice: np.ndarray, index: np.ndarray, tokens: Sequence[int], capacity: int, over: Any,
    experts: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the same for the global order of `index` (T,), by one more all_gather over `over`.

    tokens: how many every rank has.
    """
    mine = np.column_stack([index, choice]).astype(np.int64)  # (T, 1 + k)
    rows = over.all_gather(mine, dim=0, sizes=tuple(tokens)) if over.size > 1 else mine
    k = choice.shape[1]
    order = np.argsort(rows[:, 0], kind="stable")
    keep = np.empty((len(rows), k), bool)
    keep[order] = (queue_places(rows[order, 1:].reshape(-1)) < capacity).reshape(-1, k)
    starts = partition.offsets(tokens)
    cuts = [slice(start, start + n) for start, n in zip(starts, tokens, strict=True)]
    kept = [np.bincount(rows[cut, 1:][keep[cut]], minlength=experts) for cut in cuts]
    return keep[cuts[over.rank]], np.array(kept)


def queue_places(experts: np.ndarray) -> np.ndarray:
    """Return how many earlier elements are equal to each: its place in its expert's queue."""
    order = np.argsort(experts, kind="stable")
    ordered = experts[order]
    first = np.searchsorted(ordered, ordered)  # where the run of each begins
    places = np.empty(len(experts), np.int64)
    places[order] = np.arange(len(experts)) - first
    return places
