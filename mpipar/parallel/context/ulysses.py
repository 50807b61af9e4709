"""Ulysses attention: trade sequence shards for head shards, attend, and trade back.

Jacobs et al., DeepSpeed Ulysses, 2023, section 3.  7 heads over 4 ranks, by partition.blocks:

    before   rank r: its tokens, heads 0..6        after   rank 0: all tokens, heads 0 1
                                                           rank 1: all tokens, heads 2 3
    queries, keys and values travel in one all_to_all,     rank 2: all tokens, heads 4 5
    the outputs come back by the reverse one               rank 3: all tokens, head 6

A kv head goes to every rank that holds one of its query heads: with fewer kv heads than ranks it is
sent to several, and the gradients that come back from them are added.

Cost: 2 all_to_alls forward and 2 backward; of n bytes of queries a rank sends (p-1)/p of
n (1 + 2 G/H), and n (p-1)/p back, where kv heads need not be sent to several ranks.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpipar import partition
from mpipar.arrays import Array, beside, compute_dtype, module_of
from mpipar.autograd import Function
from mpipar.comm import collectives
from mpipar.parallel.communicator import Communicator


class Heads(NamedTuple):
    """Who gets which heads: for each rank the query heads, and the kv heads that these need."""

    queries: tuple[slice, ...]
    shared: tuple[slice, ...]
    group: int  # query heads a kv head

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of heads that each rank gets: of queries, keys and values together."""
        pairs = zip(self.queries, self.shared, strict=True)
        return tuple(size(some) + 2 * size(shared) for some, shared in pairs)

    def local_kv(self, rank: int) -> list[int] | None:
        """Return which of the rank's kv heads each of its query heads uses.

        None if they are whole groups in order, as the attention kernel takes them.
        """
        own, shared = self.queries[rank], self.shared[rank]
        used = [head // self.group - shared.start for head in range(own.start, own.stop)]
        each, rest = divmod(len(used), size(shared))
        return None if not rest and used == [i // each for i in range(len(used))] else used


def size(cut: slice) -> int:
    """Return the length of a slice with a start and a stop."""
    return int(cut.stop - cut.start)


def heads_of(heads: int, kv_heads: int, ranks: int) -> Heads:
    """Return who gets which heads; every rank must get at least one."""
    group = heads // kv_heads
    queries = tuple(partition.block(heads, ranks, rank) for rank in range(ranks))
    shared = tuple(slice(cut.start // group, (cut.stop - 1) // group + 1) for cut in queries)
    return Heads(queries, shared, group)


class Trade(NamedTuple):
    """The trade: the ranks, who has how many tokens and gets which heads.

    order: the places, among the tokens gathered in the order of the ranks, of the tokens in
    ascending order of their positions; None if that is the order of the ranks.
    """

    comm: Communicator
    lengths: tuple[int, ...]
    heads: Heads
    order: np.ndarray | None

    def gather_tokens(self, x: Array, widths: Sequence[int]) -> Array:
        """Send heads (widths of them to each rank) and get tokens: (B, S, heads of r, D)."""
        x = collectives.all_to_all(
            self.comm.process_group, x, 2, 1, self.lengths, None, False, scatter_sizes=widths
        )
        return x if self.order is None else x[:, beside(self.order, x)]

    def gather_heads(self, x: Array, widths: Sequence[int]) -> Array:
        """Send the tokens of others back and get their heads: (B, S of r, all heads, D)."""
        if self.order is not None:
            ascending, x = x, module_of(x).empty(x.shape, x.dtype)
            x[:, beside(self.order, x)] = ascending
        return collectives.all_to_all(
            self.comm.process_group, x, 1, 2, widths, None, False, scatter_sizes=self.lengths
        )


class ToHeads(Function):
    """q, k, v of this rank's tokens, all heads, to all tokens, this rank's heads."""

    collective = True

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, trade: Trade) -> tuple[Array, ...]:
        """Send each rank its query heads and their kv heads, in one message a rank."""
        heads, rank = trade.heads, trade.comm.rank
        parts = [
            x[:, :, cut]
            for own, shared in zip(heads.queries, heads.shared, strict=True)
            for x, cut in ((q, own), (k, shared), (v, shared))
        ]
        ctx.trade, ctx.groups = trade, k.shape[2]
        x = trade.gather_tokens(np.concatenate(parts, axis=2), heads.widths)
        q, k, v = _cut(x, heads, rank)
        used = heads.local_kv(rank)
        return (q, k, v) if used is None else (q, k[:, :, used], v[:, :, used])

    @staticmethod
    def backward(ctx: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, ...]:
        """Send the gradients back; those of a kv head that went to several ranks are added."""
        trade: Trade = ctx.trade
        heads, rank = trade.heads, trade.comm.rank
        used = heads.local_kv(rank)
        if used is not None:
            count = size(heads.shared[rank])
            dk, dv = _add_up(dk, used, count), _add_up(dv, used, count)
        x = trade.gather_heads(np.concatenate([dq, dk, dv], axis=2), heads.widths)
        wide = compute_dtype(x.dtype)
        shape = (*x.shape[:2], ctx.groups, x.shape[3])
        zeros = module_of(x).zeros
        sums = zeros(shape, wide), zeros(shape, wide)
        queries = []
        starts = accumulate(heads.widths, initial=0)
        for start, peer in zip(starts, range(trade.comm.size), strict=False):
            own, *shared = _cut(x[:, :, start : start + heads.widths[peer]], heads, peer)
            queries.append(own)
            for total, part in zip(sums, shared, strict=True):
                total[:, :, heads.shared[peer]] += part
        return np.concatenate(queries, axis=2), *sums, None


class ToTokens(Function):
    """The outputs of all tokens, this rank's heads, to this rank's tokens, all heads."""

    collective = True

    @staticmethod
    def forward(ctx: Any, out: Any, trade: Trade) -> Array:
        """Trade back."""
        ctx.trade = trade
        ctx.widths = tuple(size(cut) for cut in trade.heads.queries)
        return trade.gather_heads(out, ctx.widths)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        """The reverse trade."""
        return ctx.trade.gather_tokens(grad, ctx.widths), None


def _cut(x: Array, heads: Heads, rank: int) -> tuple[Array, Array, Array]:
    """Cut what a rank got into queries, keys and values."""
    own, shared = size(heads.queries[rank]), size(heads.shared[rank])
    return x[:, :, :own], x[:, :, own : own + shared], x[:, :, own + shared :]


def _add_up(grad: Array, used: Sequence[int], count: int) -> Array:
    """Add the gradients of the copies of each kv head: (B, S, count, D)."""
    total = module_of(grad).zeros(
        (*grad.shape[:2], count, grad.shape[3]), compute_dtype(grad.dtype)
    )
    for copy, head in enumerate(used):
        total[:, :, head] += grad[:, :, copy]
    return total.astype(grad.dtype, copy=False)
