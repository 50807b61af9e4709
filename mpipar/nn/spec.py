"""Where the local block of a parameter lies in the global array: the one description all share.

A `Spec` is what clipping, optimisers, checkpoints, random initialisation, gradient sums and FSDP
read of a parameter.  It knows nothing of MPI: a mesh axis is a name, a rank a number.

    Shard(0) of a (4, 6) weight over 2 ranks         rank 1 holds rows 2..3
    Shard(0, parts=(4, 2, 2)) of an (8, d) fused qkv weight over 2 ranks; each part is cut alone:

        global rows   q0 q1 q2 q3 | k0 k1 | v0 v1
        rank 0        q0 q1         k0      v0          pieces ((0, 2), (4, 1), (6, 1))
        rank 1              q2 q3      k1      v1       pieces ((2, 2), (5, 1), (7, 1))

Blocks are those of `partition.blocks`, so sizes need not divide.  Sharding again on another mesh
axis cuts the local block once more, along the same or another dimension.

Flat(start, stop) is the last cut that there can be: of the local block that all other axes leave,
in row-major order, the rank holds the elements start..stop as a 1-D array.  Sharded data parallel
training cuts so, across rows, since several parameters share one equal cut:

    Flat(4, 8) of a (3, 4) block        . . . . | x x x x | . . . .     local shape (4,)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from mpipar.arrays import Array, module_of
from mpipar.errors import BufferMismatchError, ConfigError, explain
from mpipar.partition import block

Pieces = tuple[tuple[int, int], ...]  # ((offset, size), ...) along one dimension
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mesh axis holds the same values."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the mesh axis holds a term of a sum."""


@dataclass(frozen=True)
class Shard:
    """Every rank of the mesh axis holds a block along `dim`.

    parts: the sizes of the concatenated arrays along dim (fused qkv), each cut on its own.
    copies: how many ranks of the axis hold this same block.
    """

    dim: int
    parts: tuple[int, ...] | None = None
    copies: int = 1


@dataclass(frozen=True)
class Flat:
    """Every rank of the mesh axis holds a range of the flattened local block, as a 1-D array.

    start, stop: which elements, row-major, of the block that the spec's `pieces` describe.
    copies: how many ranks of the axis hold this same range.
    """

    start: int
    stop: int
    copies: int = 1


Placement = Replicate | Partial | Shard | Flat


@dataclass(frozen=True)
class Spec:
    """A parameter's global name and shape, its placement on each mesh axis, and the local block.

    placements: mesh axis -> placement; an axis that is absent is Replicate().
    pieces: for each dimension the global ranges ((offset, size), ...) that the local block
    concatenates, adjacent ones merged and empty ones left out; () means everything.  Under a Flat
    placement they describe the block of which this rank holds a range.
    """

    name: str
    shape: tuple[int, ...]
    placements: dict[str, Placement] = field(default_factory=dict, hash=False)
    pieces: tuple[Pieces, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the pieces of an array that is not cut."""
        if len(self.pieces) != len(self.shape):
            object.__setattr__(self, "pieces", tuple(((0, size),) for size in self.shape))

    @classmethod
    def replicated(cls, name: str, shape: Sequence[int]) -> "Spec":
        """Return the spec of an array that every rank holds whole."""
        return cls(name, tuple(int(size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank holds: of the local block, or of a range of it."""
        flat = self.flat
        return self.block_shape if flat is None else (flat.stop - flat.start,)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the local block, whether or not a Flat placement leaves a range of it."""
        return tuple(sum(size for _, size in pieces) for pieces in self.pieces)

    @property
    def flat(self) -> Flat | None:
        """The Flat placement, if there is one."""
        found = [how for how in self.placements.values() if isinstance(how, Flat)]
        return found[0] if found else None

    @property
    def block(self) -> "Spec":
        """The spec of the whole local block: this one without its Flat placement."""
        others = dict(self.placements)
        for axis, how in self.placements.items():
            if isinstance(how, Flat):
                del others[axis]
        return replace(self, placements=others)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the first piece of each dimension starts in the global array."""
        return tuple(pieces[0][0] for pieces in self.pieces)

    @property
    def size(self) -> tuple[int, ...]:
        """How long the first piece of each dimension is."""
        return tuple(pieces[0][1] for pieces in self.pieces)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the array is cut, in the order in which it was."""
        return tuple(a for a, how in self.placements.items() if isinstance(how, Shard | Flat))

    @property
    def copies(self) -> int:
        """How many ranks of all sharded axes hold what this rank holds."""
        return prod(h.copies for h in self.placements.values() if isinstance(h, Shard | Flat))

    def placement(self, axis: str) -> Placement:
        """Return the placement on a mesh axis."""
        return self.placements.get(axis, Replicate())

    def place(self, axis: str, placement: Replicate | Partial) -> "Spec":
        """Return the spec with a placement that does not change the local block stated."""
        self._check_free(axis)
        return replace(self, placements={**self.placements, axis: placement})

    def flatten(self, axis: str, start: int, stop: int, copies: int = 1) -> "Spec":
        """Return the spec of elements start..stop of this local block, as a 1-D array.

        Raises ConfigError for an axis that already has a placement, or a range outside the block.
        """
        self._check_free(axis)
        if not 0 <= start <= stop <= prod(self.block_shape):
            rule = f"it must lie in the {prod(self.block_shape)} elements of {self.name}"
            raise ConfigError(explain("(start, stop)", (start, stop), rule, "Pass such a range"))
        return replace(self, placements={**self.placements, axis: Flat(start, stop, copies)})

    def shard(
        self,
        axis: str,
        dim: int,
        rank: int,
        size: int,
        parts: Sequence[int] | None = None,
        copies: int = 1,
    ) -> "Spec":
        """Return the spec of block `rank` of `size` of this local block, cut along `dim`.

        parts: sizes that add up to the global length of dim, each cut into `size` blocks on its
        own; only for a dimension that is not cut yet.  copies: as in Shard.
        Raises ConfigError for an axis that already has a placement, a dim or rank that does not
        exist, or parts that do not fit.
        """
        self._check_free(axis)
        if not 0 <= dim < len(self.shape):
            rule = f"it must be one of the {len(self.shape)} dimensions of {self.name}"
            raise ConfigError(explain("dim", dim, rule, "Choose one of them, from 0"))
        if not 0 <= rank < size:
            rule = f"it must be one of the {size} ranks of axis {axis!r}"
            raise ConfigError(explain("rank", rank, rule, "Pass 0 <= rank < size"))
        whole = sum(length for _, length in self.pieces[dim])
        cut_parts = (whole,) if parts is None else tuple(parts)
        if parts is not None:
            self._check_parts(dim, cut_parts)
        chosen: list[tuple[int, int]] = []
        start = 0
        for part in cut_parts:
            cut = block(part, size, rank)
            chosen += _select(self.pieces[dim], start + cut.start, start + cut.stop)
            start += part
        end = sum(self.pieces[dim][-1])
        local = _merge(chosen) or ((end, 0),)
        pieces = (*self.pieces[:dim], local, *self.pieces[dim + 1 :])
        how = Shard(dim, None if parts is None else cut_parts, copies)
        return replace(self, placements={**self.placements, axis: how}, pieces=pieces)

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield (slices of the local block, slices of the global array) of every solid piece.

        Under a Flat placement they are those of the whole block.
        """
        yield from (
            (tuple(local for local, _ in box), tuple(where for _, where in box))
            for box in product(*(_ranges(pieces) for pieces in self.pieces))
        )

    def take(self, whole: Array) -> Array:
        """Return what this rank holds of a global array; a view where no joining is needed.

        Raises BufferMismatchError if the array does not have the global shape.
        """
        self._check_shape("whole", whole, self.shape)
        if self.flat is not None:
            return self.block.take(whole).reshape(-1)[self.flat.start : self.flat.stop]
        for dim, pieces in enumerate(self.pieces):
            at: Box = (slice(None),) * dim
            cut = [whole[(*at, where)] for _, where in _ranges(pieces)]
            whole = cut[0] if len(cut) == 1 else module_of(whole).concatenate(cut, axis=dim)
        return whole

    def put(self, whole: Array, local: Array) -> None:
        """Write what this rank holds into its places of a global array: the reverse of `take`.

        Raises BufferMismatchError if one of the arrays does not have its shape.
        """
        self._check_shape("whole", whole, self.shape)
        self._check_shape("local", local, self.local_shape)
        if self.flat is not None:
            block = module_of(whole).array(self.block.take(whole), order="C")
            block.reshape(-1)[self.flat.start : self.flat.stop] = local
            self.block.put(whole, block)
            return
        for here, there in self.boxes():
            whole[there] = local[here]

    def index_along(self, dim: int) -> np.ndarray:
        """Return the global index along `dim` of each local index, as uint64."""
        ranges = [np.arange(at, at + n, dtype=np.uint64) for at, n in self.pieces[dim]]
        return np.concatenate(ranges)

    def global_index(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the row-major index in the global array of every local element, as uint64.

        rows: only these local indices of dimension 0, for work in blocks.
        """
        if self.flat is not None:
            start, stop, _ = rows.indices(self.flat.stop - self.flat.start)
            return self._index_of_range(self.flat.start + start, self.flat.start + stop)
        total: np.ndarray = np.zeros((), np.uint64)
        for dim in range(len(self.shape)):
            along = self.index_along(dim)[rows if dim == 0 else slice(None)]
            total = total[..., None] + along * np.uint64(prod(self.shape[dim + 1 :]))
        return total

    def _index_of_range(self, start: int, stop: int) -> np.ndarray:
        """Return the global indices of elements start..stop of the flattened block."""
        width = prod(self.block_shape[1:])
        if stop <= start or not self.shape:
            return np.zeros(max(0, stop - start), np.uint64)
        first, last = start // width, -(-stop // width)  # the rows of the block that they touch
        index = self.block.global_index(slice(first, last)).reshape(-1)
        return index[start - first * width : stop - first * width]

    def _check_free(self, axis: str) -> None:
        if self.flat is not None:
            rule = f"{self.name} is flat already, and no axis can cut it further"
            raise ConfigError(explain("axis", axis, rule, "Cut along the other axes first"))
        if axis in self.placements:
            rule = f"{self.name} must not have a placement on this mesh axis yet"
            raise ConfigError(explain("axis", axis, rule, "Place each axis once"))

    def _check_parts(self, dim: int, parts: tuple[int, ...]) -> None:
        if sum(parts) != self.shape[dim] or min(parts, default=-1) < 0:
            rule = f"the parts of {self.name} must add up to {self.shape[dim]}, dimension {dim}"
            raise ConfigError(explain("parts", parts, rule, "Pass the sizes of what was joined"))
        if self.pieces[dim] != ((0, self.shape[dim]),):
            rule = f"dimension {dim} of {self.name} must not be cut yet"
            raise ConfigError(explain("parts", parts, rule, "Shard by parts first"))

    def _check_shape(self, what: str, array: Array, shape: tuple[int, ...]) -> None:
        if tuple(array.shape) != shape:
            rule = f"it must be {shape}, that of {self.name}"
            raise BufferMismatchError(explain(f"{what}.shape", array.shape, rule, "Pass that one"))


def _select(pieces: Pieces, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the global ranges of the local indices start..stop of concatenated pieces."""
    chosen = []
    position = 0
    for offset, size in pieces:
        low, high = max(start, position), min(stop, position + size)
        if low < high:
            chosen.append((offset + low - position, high - low))
        position += size
    return chosen


def _merge(ranges: Sequence[tuple[int, int]]) -> Pieces:
    """Join ranges that follow each other without a gap."""
    merged: list[tuple[int, int]] = []
    for offset, size in ranges:
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return tuple(merged)


def _ranges(pieces: Pieces) -> list[tuple[slice, slice]]:
    """Return (local slice, global slice) of each piece of one dimension."""
    position = 0
    ranges = []
    for offset, size in pieces:
        ranges.append((slice(position, position + size), slice(offset, offset + size)))
        position += size
    return ranges
