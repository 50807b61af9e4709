"""Who writes what: ranks that hold the same block write a part of it each.

Nobody knows all tensors: a stage of a pipeline knows its own.  So the ranks tell each other what
they hold, as 64-bit keys of blocks; ranks that hold all the same tell it once.

    dp = 2, tp = 2     rank 0, 2: rows 0..7 of w      rank 0 writes 0..3, rank 2 rows 4..7
                       rank 1, 3: rows 8..15          rank 1 writes 8..11, rank 3 rows 12..15
    a norm's weight    ranks 0 1 2 3                  one of them, another for each small tensor

Cost: two all_gathers of a few bytes a rank and tensor; no values travel.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from mpipar import rng
from mpipar.arrays import Array, is_device, module_of
from mpipar.arrays import dtype as dtype_of
from mpipar.checkpoint.entries import Entry
from mpipar.checkpoint.format import Head, Place, lay_out
from mpipar.checkpoint.layout import Runs, runs_of
from mpipar.errors import ConfigError, MismatchError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.partition import block

SMALL = 1 << 16  # bytes of a block that one rank writes alone
Holding = tuple[int, int, int]  # number of the tensor, key of the block, its elements


@dataclass(frozen=True)
class Piece:
    """What this rank writes of a tensor: elements start.. of an array, and where in the file.

    runs: in bytes; the first begins with element `start`.
    """

    array: Array
    start: int
    runs: Runs

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.runs.total

    def bytes(self, low: int, high: int) -> np.ndarray:
        """Return bytes low..high of it, uint8; without a copy where the array is solid."""
        size = self.array.dtype.itemsize
        found = elements(self.array, self.start + low // size, self.start + high // size)
        return found.view(np.uint8)

    def copy(self) -> "Piece":
        """Return it with an array of its own, which has only what is written."""
        size = self.array.dtype.itemsize
        solid = elements(self.array, self.start, self.start + self.nbytes // size)
        return replace(self, array=solid.copy(), start=0)


@dataclass(frozen=True)
class Share:
    """A file as this rank sees it.

    pieces: for each tensor of the head, what this rank writes of it; None for nothing.
    most: for each tensor, the most bytes that one rank writes.
    """

    head: Head
    pieces: tuple[Piece | None, ...]
    most: tuple[int, ...]


def elements(array: Array, start: int, stop: int) -> np.ndarray:
    """Return elements start..stop of an array, row-major, on the host; a view where it can be."""
    xp = module_of(array)
    if not array.flags.c_contiguous and array.ndim:
        width = max(1, prod(array.shape[1:]))
        first = start // width
        array = xp.ascontiguousarray(array[first : -(-stop // width)])
        start, stop = start - first * width, stop - first * width
    part = array.reshape(-1)[start:stop]
    return part.get() if is_device(part) else part


def share_out(comm: Communicator, file: str, entries: Sequence[Entry]) -> Share:
    """Collective: decide where every tensor lies in a file and what this rank writes of it.

    Raises, on every rank, MismatchError if ranks disagree on a tensor, and ConfigError if no rank
    holds some of its elements, or a dtype cannot be saved.
    """
    own = {entry.name: entry for entry in reversed(entries)}  # the first of several of one name
    head = lay_out(_all_tensors(comm, file, list(own.values())))
    numbers = {place.name: number for number, place in enumerate(head.places)}
    held: set[Holding] = set()
    for name, entry in own.items():
        if entry.held and entry.array.size:
            held.add((numbers[name], _key(entry), int(entry.array.size)))
    holders = _holders(comm, held)
    _check_whole(file, head.places, holders)
    pieces: list[Piece | None] = [None] * len(head.places)
    most = [0] * len(head.places)
    for (number, key, size), ranks in holders.items():
        place = head.places[number]
        alone = size * place.dtype.itemsize <= SMALL or len(ranks) == 1
        most[number] = max(
            most[number], place.dtype.itemsize * (size if alone else -(-size // len(ranks)))
        )
        if comm.rank not in ranks or (number, key, size) not in held:
            continue
        part = slice(0, size)
        if not alone:
            part = block(size, len(ranks), ranks.index(comm.rank))
        elif ranks[number % len(ranks)] != comm.rank:
            continue
        entry = own[place.name]
        runs = runs_of(entry.spec).part(part.start, part.stop)
        runs = runs.in_bytes(place.dtype.itemsize, place.start)
        pieces[number] = Piece(entry.array, part.start, runs)
    return Share(head, tuple(pieces), tuple(most))


def _all_tensors(comm: Communicator, file: str, entries: Sequence[Entry]) -> list[Place]:
    """Collective: return the tensors that any rank has, without their places."""
    rows = [(e.name, e.array.dtype.name, list(e.spec.shape)) for e in entries]
    found: dict[str, tuple[str, list[int]]] = {}
    for text, ranks in distinct(comm, json.dumps(sorted(rows)).encode()):
        for name, dtype, shape in json.loads(text):
            if found.setdefault(name, (dtype, shape)) != (dtype, shape):
                rule = f"{name} of {file} is {found[name]} elsewhere"
                fix = "Give other arrays other names"
                raise MismatchError(explain(f"rank {ranks[0]}", (dtype, shape), rule, fix))
    return [Place(name, dtype_of(d), tuple(shape)) for name, (d, shape) in found.items()]


def _holders(comm: Communicator, held: set[Holding]) -> dict[Holding, list[int]]:
    """Collective: return for each block of each tensor the ranks that hold it."""
    holders: dict[Holding, list[int]] = {}
    for rows, ranks in distinct(comm, np.array(sorted(held), np.int64).tobytes()):
        for number, key, size in np.frombuffer(rows, np.int64).reshape(-1, 3).tolist():
            holders.setdefault((number, key, size), []).extend(ranks)
    return {holding: sorted(ranks) for holding, ranks in sorted(holders.items())}


def _key(entry: Entry) -> int:
    """Return 63 bits that are equal for equal blocks."""
    flat = entry.spec.flat
    return rng.key(0, entry.spec.pieces, flat and (flat.start, flat.stop)) >> 1


def _check_whole(file: str, places: Sequence[Place], holders: dict[Holding, list[int]]) -> None:
    covered = [0] * len(places)
    for number, _, size in holders:
        covered[number] += size
    for place, elements_held in zip(places, covered, strict=True):
        if elements_held != prod(place.shape):
            rule = f"all ranks together must hold its {prod(place.shape)} elements once"
            fix = f"Save {file} over the mesh that all of them are on, with the specs it gave"
            raise ConfigError(explain(place.name, f"{elements_held} elements", rule, fix))


def distinct(comm: Communicator, payload: bytes) -> list[tuple[bytes, list[int]]]:
    """Collective: return every payload that ranks have, once, with those ranks."""
    if comm.size == 1:
        return [(payload, [0])]
    digest = np.frombuffer(hashlib.blake2b(payload, digest_size=16).digest(), np.int64)
    table = comm.all_gather(np.array([[*digest, len(payload)]], np.int64), dim=0)
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, row in enumerate(table.tolist()):
        ranks.setdefault((row[0], row[1]), []).append(rank)
    first = {members[0]: members for members in ranks.values()}
    sizes = tuple(int(table[r, 2]) if r in first else 0 for r in range(comm.size))
    mine = np.frombuffer(payload if comm.rank in first else b"", np.uint8)
    told = comm.all_gather(mine.copy(), dim=0, sizes=sizes).tobytes()
    found, at = [], 0
    for rank in sorted(first):
        found.append((told[at : at + sizes[rank]], first[rank]))
        at += sizes[rank]
    return found
