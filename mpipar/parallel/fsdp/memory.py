"""Bytes of FSDP on this rank, counted from the arrays that there are.

params, once: shards + buffers that are gathered into; gradients: shards' + whole ones in use

With the optimiser's state and activations that is what a rank's training takes (tests compare it
with what the system counts).
"""

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from mpipar.parallel.fsdp.gather import Gatherer
from mpipar.parallel.fsdp.links import Links
from mpipar.parallel.fsdp.reducer import Reducer
from mpipar.parallel.fsdp.unit import Unit

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank.

    whole: of the parameters, if it held them all; shards: of its parts of them; kept: that cannot
    be given back between steps (more than the shards where whole parameters stay); gathered: of
    buffers that hold whole parameters, without the shards in them; gathered_peak: the most so far;
    gradients, gradients_peak: of shards' and whole gradients, now and the most so far; messages: of
    what is received to be added.
    """

    whole: int
    shards: int
    kept: int
    gathered: int
    gathered_peak: int
    gradients: int
    gradients_peak: int
    messages: int

    @property
    def peak(self) -> int:
        """The most bytes of all so far: parameters and gradients peak together, in backward."""
        return self.shards + self.gathered_peak + self.gradients_peak + self.messages

    @property
    def reduction_percent(self) -> float:
        """How much of the whole parameters this rank need not keep."""
        return 100.0 * (1 - self.kept / self.whole) if self.whole else 0.0

    def stats(self) -> dict[str, float]:
        """Return the numbers that FSDP.memory_stats promises, in 2^20 bytes."""
        return {
            "total_param_memory_mb": self.whole / MEGABYTE,
            "local_shard_memory_mb": self.shards / MEGABYTE,
            "peak_allgather_memory_mb": self.gathered_peak / MEGABYTE,
            "memory_saved_mb": (self.whole - self.kept) / MEGABYTE,
            "peak_memory_mb": self.peak / MEGABYTE,
        }


def measure(units: Sequence[Unit], gatherer: Gatherer, reducer: Reducer, links: Links) -> Memory:
    """Count the arrays."""
    whole = sum(shape_bytes(unit) for unit in units)
    shared = sum(unit.shard_bytes for unit in units if unit.in_place)
    return Memory(
        whole,
        sum(unit.shard_bytes for unit in units),
        sum(unit.kept_bytes for unit in units),
        gatherer.buffer_bytes - shared,
        max(0, gatherer.peak_bytes - shared),
        reducer.bytes,
        reducer.peak_bytes,
        links.bytes,
    )


def give_back_freed() -> None:
    """Let GNU's malloc give the system what is free: of whole parameters that were cut, say."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def shape_bytes(unit: Unit) -> int:
    """Return the bytes of a unit's whole parameters, in the dtype of the shards."""
    places = unit.layout.places
    return sum(place.stop - place.start for place in places) * unit.wide.itemsize
