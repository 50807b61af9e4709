"""The batch of a step and its micro-batches: blocks along dimension 0 (partition.blocks).

    batch of 10 sequences, 4 micro-batches     0..2  3..5  6..7  8..9

The first rank sees the inputs, the last the targets; `cut` has all ranks agree on the number of
rows, so that each knows the size of every micro-batch.
"""

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar import rng
from mpipar.errors import BufferMismatchError, ConfigError, MpiparError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.parallel.pipeline.agreement import exchange
from mpipar.partition import blocks, offsets

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a step (empty where they are not needed), and how they are cut.

    kind: a number for the shapes and dtypes of the inputs, the same on all ranks.
    place: where the random numbers of the step stand.
    """

    inputs: Arrays
    targets: Arrays
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    kind: int
    place: rng.Place

    def part(self, arrays: Arrays, k: int) -> Arrays:
        """Return the rows of micro-batch k."""
        start = self.starts[k]
        return tuple(x[start : start + self.sizes[k]] for x in arrays)

    def at(self, k: int) -> Any:
        """Return a context in which micro-batch k draws what its rows draw in the whole batch."""
        position = self.place.position
        if position is None:
            return nullcontext()
        return rng.at(position.step, position.row + self.starts[k])


def cut(
    comm: Communicator,
    inputs: Any,
    targets: Any,
    ends: tuple[int, int],
    microbatches: int,
    needs_targets: bool,
    fault: MpiparError | None = None,
) -> Batch:
    """Collective: return the batch cut into micro-batches.

    ends: the ranks of the first and of the last stage.  fault: what is wrong on this rank already.
    Raises on every rank ConfigError if the inputs or targets are missing where they are needed or
    are fewer than the micro-batches, BufferMismatchError if their rows differ.
    """
    first, last = ends
    own: dict[str, Arrays] = {"inputs": (), "targets": ()}
    rows = {"inputs": 0, "targets": 0}
    try:
        if comm.rank == first:
            own["inputs"], rows["inputs"] = _arrays("inputs", inputs)
        if comm.rank == last and needs_targets:
            own["targets"], rows["targets"] = _arrays("targets", targets)
    except MpiparError as error:
        fault = fault or error
    looks = repr([(x.shape[1:], x.dtype.name) for x in own["inputs"]])
    numbers = rows["inputs"], rows["targets"], zlib.crc32(looks.encode())
    table = exchange(comm, numbers, fault)
    count, kind = int(table[first, 0]), int(table[first, 2])
    if count < microbatches:
        rule = f"there must be a row for each micro-batch, but the batch has {count}"
        fix = f"Pass at most {count}, or a larger batch"
        raise ConfigError(explain("microbatches", microbatches, rule, fix))
    if needs_targets and table[last, 1] != count:
        rule = f"there must be as many as inputs, {count}"
        raise BufferMismatchError(
            explain("targets: rows", int(table[last, 1]), rule, "Pass those of the same batch")
        )
    sizes = blocks(count, microbatches)
    place = rng.place()
    return Batch(own["inputs"], own["targets"], sizes, offsets(sizes), kind, place)


def _arrays(what: str, given: Any) -> tuple[Arrays, int]:
    """Return an array, or several, as a tuple, and their number of rows."""
    end = "first" if what == "inputs" else "last"
    if given is None:
        rule = f"the rank of the {end} stage must have them"
        raise ConfigError(explain(what, None, rule, "Pass them there"))
    arrays = tuple(
        x if hasattr(x, "dtype") else np.asarray(x)
        for x in (given if isinstance(given, tuple) else (given,))
    )
    lengths = [x.shape[0] if x.ndim else 0 for x in arrays]
    if not lengths or min(lengths) < 1 or min(lengths) != max(lengths):
        rule = "they must be arrays with one number of rows (dimension 0), at least 1"
        shapes = [tuple(x.shape) for x in arrays]
        raise BufferMismatchError(explain(f"{what}: shapes", shapes, rule, "Pass such"))
    return arrays, lengths[0]
