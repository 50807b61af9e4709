"""Checksums of blocks of 4 MiB of a file that many ranks write, added up without reading it.

    sum of a block = sum over its words of (word k) * W_k  mod 2^64       W_k: odd random numbers

It is linear: each rank adds the words it writes, wherever they lie, and one all_reduce gives the
sums of all blocks.  An error in one word always changes the sum (W_k is odd), any other one goes
unseen with a probability of 2^-32 at most.  Multilinear hashing: Lemire, Kaser, Strongly universal
string hashing is fast (2014).  A part of a word counts as the word with zeros in the rest.
"""

from functools import cache

import numpy as np

from mpipar import rng

BLOCK = 1 << 22  # bytes
WORD = 4
CHUNK = 1 << 15  # words multiplied at a time, so that products stay in cache
MANY = 1 << 17  # words, or parts of words, that are looked up at a time


@cache
def weights() -> np.ndarray:
    """Return W of a block, uint64."""
    index = np.arange(BLOCK // WORD, dtype=np.uint64)
    return rng.bits(rng.key(0, "checksum"), index) | np.uint64(1)


def of_block(data: np.ndarray) -> int:
    """Return the sum of a whole block, or of the last and shorter one: bytes, uint8."""
    data = np.pad(data, (0, -len(data) % WORD)) if len(data) % WORD else data
    return int(_sum_of_run(data.view(np.uint32), 0))


class Sums:
    """What one rank has to add to the sums of all blocks of a file.

    values: uint64, one for each block.
    """

    def __init__(self, nbytes: int) -> None:
        """Begin with zeros for a file of so many bytes."""
        self.values = np.zeros(-(-nbytes // BLOCK), np.uint64)

    def add(self, data: np.ndarray, where: np.ndarray, length: np.ndarray) -> None:
        """Add runs of bytes: data, uint8, holds them one behind the other; where in the file."""
        where, length = _within_blocks(where, length)
        if not len(where):
            return
        odd = int(np.bitwise_or.reduce(where) | np.bitwise_or.reduce(length))
        unit = next(u for u in (4, 2, 1) if odd % u == 0)
        units = data.view(f"u{unit}")
        blocks, starts, counts = where // BLOCK, where % BLOCK // unit, length // unit
        ends = np.cumsum(counts)
        first = 0
        while first < len(starts):  # as many runs at a time as make MANY units, or a longer one
            begin = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begin + MANY, "right")))
            last = min(last, int(np.searchsorted(blocks, blocks[first], "right")))
            part, of = units[begin : int(ends[last - 1])], slice(first, last)
            if last - first == 1 and unit == WORD:
                self.values[blocks[of]] += _sum_of_run(part, int(starts[first]))
            else:
                sums = _sums_of_runs(part, starts[of], counts[of], WORD // unit)
                np.add.at(self.values, blocks[of], sums)
            first = last


def _sum_of_run(words: np.ndarray, start: int) -> np.uint64:
    """Return the sum of neighbouring words, the first of them word `start` of a block."""
    table = weights()[start : start + len(words)]
    sums = np.zeros(-(-len(words) // CHUNK), np.uint64)
    space = np.empty(min(CHUNK, len(words)), np.uint64)
    for number, at in enumerate(range(0, len(words), CHUNK)):
        part = words[at : at + CHUNK]
        np.multiply(part, table[at : at + len(part)], out=space[: len(part)])
        sums[number] = space[: len(part)].sum()
    return sums.sum()


def _sums_of_runs(
    units: np.ndarray, starts: np.ndarray, counts: np.ndarray, each: int
) -> np.ndarray:
    """Return the sum of every run; they stand one behind the other in `units`, `each` a word."""
    steps = np.diff(starts)
    if each == 1 and len(steps) and (counts == counts[0]).all() and (steps == steps[0]).all():
        table = weights()[starts[0] :]  # the rows of a matrix: no lookups
        rows = np.lib.stride_tricks.as_strided(
            table, (len(starts), counts[0]), (steps[0] * table.itemsize, table.itemsize)
        )
        found: np.ndarray = (units.reshape(rows.shape) * rows).sum(axis=1)
        return found
    begins = np.cumsum(counts) - counts
    index = np.repeat(starts - begins, counts)
    index += np.arange(len(units))
    if each == 1:
        terms = units * weights()[index]
    else:
        word, place = np.divmod(index, each)
        terms = units * weights()[word]
        terms <<= (place * (8 * WORD // each)).astype(np.uint64)
    return np.add.reduceat(terms, begins)


def _within_blocks(where: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same runs, without empty ones, cut where a block of the file ends."""
    some = length > 0
    where, length = where[some], length[some]
    first, last = where // BLOCK, (where + length - 1) // BLOCK
    cuts = last - first + 1
    if not len(cuts) or cuts.max() == 1:
        return where, length
    number = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)  # 0, 1.. in its run
    block = np.repeat(first, cuts) + number
    start = np.maximum(np.repeat(where, cuts), block * BLOCK)
    stop = np.minimum(np.repeat(where + length, cuts), (block + 1) * BLOCK)
    return start, stop - start
