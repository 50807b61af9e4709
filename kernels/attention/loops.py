"""Attention as two loops in machine code: products, exponentials and sums of few rows at a time.

    forward    8 queries against the keys that they see:   s = q k^T    p = e^(s - top)    o = p v
    backward  32 queries, again in eights:  p and ds as above;  then  dv += p^T do,  dk += ds^T q

so the scores stay in the cache and the full matrix of them never exists.  What the products read
is packed into `space` first: rows after each other, D filled up to a multiple of 16 with zeros;
and keys across, 32 of them side by side.  Of a kv head the keys are packed once.

Arrays are given with their steps, as they are views: `sizes` holds what is named in Sizes, below.
A call does the queries from `start` to `stop` of the kv heads `first` to `last`, counted over the
batch; those of a head come in order, so that a long sequence can be done in pieces.

Where |q| |k| says that no score is beyond BOUND, nothing is subtracted before the exponential.
"""

import numpy as np

from mpipar.kernels.native import Floats, Ints, loop
from mpipar.kernels.native_math import ONE, ZERO, exp_below, largest
from mpipar.kernels.native_product import columns, wide

ROWS, SIDE, LANES = 8, 32, 16
BACK = 64  # queries of a tile in backward
BOUND = 30.0  # e^30, and sums of it, are far from the limits of float32
SQUARE = np.float32(BOUND**2)
PAD = 16  # elements between rows of scores, which would else meet in the same places of a cache
LOWEST = np.float32(-np.inf)


def visible(ahead: int, query: int, keys: int) -> int:
    """Return how many keys a query sees, if query 0 sees ahead + 1."""
    return min(max(ahead + query + 1, 0), keys)


def above(n: int, step: int) -> int:
    """Return the next multiple of `step` from n on."""
    return (n + step - 1) // step * step


def forward_space(keys: int, width: int) -> int:
    """Return the elements of `space` for forward."""
    full, padded = above(width, LANES), above(keys, SIDE)
    return 1 + 2 * padded * full + ROWS * (padded + PAD + 2 * full)


def backward_space(keys: int, width: int) -> int:
    """Return the elements of `space` for backward."""
    full, padded = above(width, LANES), above(keys, SIDE)
    return 5 * padded * full + 2 * BACK * (padded + PAD + full) + ROWS * full


def pack_rows(
    x: np.ndarray, at: int, step: int, rows: int, width: int, space: np.ndarray, to: int,
    filled: int, full: int, factor: float | np.float32,
) -> None:  # fmt: skip
    """Write rows of x times a factor to `space`, and zeros up to `filled` rows of `full`."""
    for i in range(rows):
        for d in range(width):
            space[to + i * full + d] = x[at + i * step + d] * factor
        for d in range(width, full):
            space[to + i * full + d] = ZERO
    for i in range(rows * full, filled * full):
        space[to + i] = ZERO


def pack_across(
    x: np.ndarray, at: int, step: int, rows: int, width: int, space: np.ndarray, to: int,
    full: int, factor: float | np.float32,
) -> None:  # fmt: skip
    """Write rows of x times a factor across: 32 of them side by side (full, 32), then the next."""
    for i in range(0, rows, SIDE):
        some = min(SIDE, rows - i)
        if some == SIDE:  # the common case has a loop whose length the compiler knows
            for d in range(width):
                for j in range(SIDE):
                    space[to + i * full + d * SIDE + j] = x[at + (i + j) * step + d] * factor
        for d in range(width if some < SIDE else 0):
            for j in range(some):
                space[to + i * full + d * SIDE + j] = x[at + (i + j) * step + d] * factor
            for j in range(some, SIDE):
                space[to + i * full + d * SIDE + j] = ZERO
        for d in range(width * SIDE, full * SIDE):
            space[to + i * full + d] = ZERO


def square(x: np.ndarray, at: int, width: int) -> np.float32:
    """Return the sum of the squares of some elements."""
    total = ZERO
    for d in range(width):
        total += x[at + d] * x[at + d]
    return total


def exponentials(
    space: np.ndarray, at: int, own: int, stop: int, head: float | np.float32
) -> np.float32:
    """Replace the first `own` of a row of scores by e^(s - head), those up to `stop` by 0.

    Return their sum.  There is room up to a multiple of SIDE: so many at a time are the loop of
    which the compiler knows the length, which it makes without rests.
    """
    total = ZERO
    for j in range(0, stop, SIDE):
        left = own - j
        for t in range(SIDE):
            e = exp_below(space[at + j + t] - head)
            e = e if t < left else ZERO
            space[at + j + t] = e
            total += e
    return total


def differences(
    space: np.ndarray, p: int, ds: int, own: int, stop: int, head: float | np.float32,
    less: float | np.float32,
) -> None:  # fmt: skip
    """Replace a row of scores by p = e^(s - head), and one of dp by ds = p (dp + less)."""
    for j in range(0, stop, SIDE):
        left = own - j
        for t in range(SIDE):
            e = exp_below(space[p + j + t] - head)
            change = e * (space[ds + j + t] + less)
            space[p + j + t] = e if t < left else ZERO
            space[ds + j + t] = change if t < left else ZERO


@loop
def forward_loop(
    q: Floats, k: Floats, v: Floats, out: Floats, total: Floats, top: Floats, space: Floats,
    sizes: Ints, first: int, last: int, start: int, stop: int, scale: float,
) -> None:  # fmt: skip
    """Write o, and for each query the sum of e^(s - top), and top: both (B, H, S)."""
    groups, repeat, seq, keys = sizes[0], sizes[1], sizes[2], sizes[3]
    width, ahead = sizes[4], sizes[5]
    full, padded = above(width, LANES), above(keys, SIDE)
    across, values = 1, 1 + padded * full
    scores, step = values + padded * full, padded + PAD
    rows_at = scores + ROWS * step
    result = rows_at + ROWS * full
    for pair in range(first, last):
        b, g = pair // groups, pair % groups
        if start == 0:
            at = b * sizes[9] + g * sizes[11]
            pack_across(k, at, sizes[10], keys, width, space, across, full, scale)
            at = b * sizes[12] + g * sizes[14]
            pack_rows(v, at, sizes[13], keys, width, space, values, keys, full, ONE)
            most = ZERO
            for j in range(keys):
                most = max(most, square(k, b * sizes[9] + g * sizes[11] + j * sizes[10], width))
            space[0] = most * scale * scale
        for h in range(g * repeat, (g + 1) * repeat):
            for i in range(start, stop, ROWS):
                rows = min(ROWS, seq - i)
                at = b * sizes[6] + i * sizes[7] + h * sizes[8]
                pack_rows(q, at, sizes[7], rows, width, space, rows_at, ROWS, full, ONE)
                seen = visible(ahead, i + rows - 1, keys)
                for j in range(0, seen, SIDE):
                    wide(
                        space, scores + j, step, space, rows_at, full, 1,
                        space, across + j * full, SIDE, full, False,
                    )  # fmt: skip
                row = (b * groups * repeat + h) * seq + i
                for r in range(rows):
                    at, own = scores + r * step, visible(ahead, i + r, keys)
                    head = ZERO
                    if not square(space, rows_at + r * full, full) * space[0] <= SQUARE:
                        head = largest(space, at, at + own) if own else ZERO
                        head = ZERO if head == LOWEST else head
                    both = exponentials(space, at, own, seen, head)
                    total[row + r], top[row + r] = both, head
                columns(
                    space, result, full, space, scores, step, 1,
                    space, values, full, seen, False, full,
                )  # fmt: skip
                place = b * sizes[15] + i * sizes[16] + h * sizes[17]
                for r in range(rows):
                    share = ONE / total[row + r] if total[row + r] != ZERO else ZERO
                    for d in range(width):
                        out[place + d] = space[result + r * full + d] * share
                    place += sizes[16]


@loop
def backward_loop(
    do: Floats, q: Floats, k: Floats, v: Floats, top: Floats, rest: Floats, shift: Floats,
    dq: Floats, dk: Floats, dv: Floats, space: Floats, sizes: Ints,
    first: int, last: int, start: int, stop: int, scale: float,
) -> None:  # fmt: skip
    """Write dq, dk and dv; p = e^(s - top) rest, and shift = -rest D, of each query (B, H, S)."""
    groups, repeat, seq, keys = sizes[0], sizes[1], sizes[2], sizes[3]
    width, ahead = sizes[4], sizes[5]
    full, padded = above(width, LANES), above(keys, SIDE)
    across, values, plain = 0, padded * full, 2 * padded * full
    sum_k, sum_v = 3 * padded * full, 4 * padded * full
    step, p_at = padded + PAD, 5 * padded * full
    ds_at = p_at + BACK * step
    rows_at = ds_at + BACK * step
    g_at = rows_at + BACK * full
    result = g_at + BACK * full
    for pair in range(first, last):
        b, g = pair // groups, pair % groups
        if start == 0:
            at = b * sizes[9] + g * sizes[11]
            pack_across(k, at, sizes[10], keys, width, space, across, full, scale)
            pack_rows(k, at, sizes[10], keys, width, space, plain, keys, full, scale)
            at = b * sizes[12] + g * sizes[14]
            pack_across(v, at, sizes[13], keys, width, space, values, full, ONE)
            for j in range(sum_k, p_at):
                space[j] = ZERO
        for h in range(g * repeat, (g + 1) * repeat):
            for i in range(start, stop, BACK):
                rows = min(BACK, min(stop, seq) - i)
                tall = above(rows, ROWS)
                at = b * sizes[6] + i * sizes[7] + h * sizes[8]
                pack_rows(q, at, sizes[7], rows, width, space, rows_at, tall, full, ONE)
                row = (b * groups * repeat + h) * seq + i
                at = b * sizes[15] + i * sizes[16] + h * sizes[17]
                for r in range(rows):
                    place, to, factor = at + r * sizes[16], g_at + r * full, rest[row + r]
                    for d in range(width):
                        space[to + d] = do[place + d] * factor
                    for d in range(width, full):
                        space[to + d] = ZERO
                for j in range(g_at + rows * full, g_at + tall * full):
                    space[j] = ZERO
                for r8 in range(0, rows, ROWS):
                    seen = visible(ahead, i + min(r8 + ROWS, rows) - 1, keys)
                    for j in range(0, seen, SIDE):
                        wide(
                            space, p_at + r8 * step + j, step, space, rows_at + r8 * full, full, 1,
                            space, across + j * full, SIDE, full, False,
                        )  # fmt: skip
                        wide(
                            space, ds_at + r8 * step + j, step, space, g_at + r8 * full, full, 1,
                            space, values + j * full, SIDE, full, False,
                        )  # fmt: skip
                    for r in range(r8, r8 + ROWS):
                        own = visible(ahead, i + r, keys) if r < rows else 0
                        head = top[row + r] if own else ZERO
                        less = shift[row + r] if own else ZERO
                        differences(space, p_at + r * step, ds_at + r * step, own, seen, head, less)
                    columns(
                        space, result, full, space, ds_at + r8 * step, step, 1,
                        space, plain, full, seen, False, full,
                    )  # fmt: skip
                    at = b * sizes[18] + (i + r8) * sizes[19] + h * sizes[20]
                    for r in range(min(ROWS, rows - r8)):
                        for d in range(width):
                            dq[at + d] = space[result + r * full + d]
                        at += sizes[19]
                r0 = 0
                for j in range(0, visible(ahead, i + rows - 1, keys), ROWS):
                    while visible(ahead, i + min(r0 + ROWS, rows) - 1, keys) <= j:
                        r0 += ROWS
                    columns(
                        space, sum_v + j * full, full, space, p_at + r0 * step + j, 1, step,
                        space, g_at + r0 * full, full, tall - r0, True, full,
                    )  # fmt: skip
                    columns(
                        space, sum_k + j * full, full, space, ds_at + r0 * step + j, 1, step,
                        space, rows_at + r0 * full, full, tall - r0, True, full,
                    )  # fmt: skip
        if stop >= seq:
            at, to = b * sizes[21] + g * sizes[23], b * sizes[24] + g * sizes[26]
            for j in range(keys):
                for d in range(width):
                    dk[at + d] = space[sum_k + j * full + d] * scale
                    dv[to + d] = space[sum_v + j * full + d]
                at += sizes[22]
                to += sizes[25]
