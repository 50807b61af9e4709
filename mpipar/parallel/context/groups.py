"""The two kinds of groups that a context-parallel group of p = ulysses * g ranks is cut into.

6 ranks, ulysses = 2:     neighbours   0 1 | 2 3 | 4 5         rings   0 2 4 | 1 3 5

Made once for a communicator and each degree, kept with it, and destroyed with it.
"""

from collections.abc import Sequence
from typing import cast

from mpi4py import MPI

from mpipar.parallel.communicator import Communicator


def neighbours_and_ring(comm: Communicator, ulysses: int) -> tuple[Communicator, Communicator]:
    """Return this rank's group of `ulysses` neighbours, and its ring of every `ulysses`-th rank.

    Collective over `comm` the first time; after that the same objects come back.
    """
    if ulysses == comm.size:
        return comm, comm  # the ring is not used
    if ulysses == 1:
        return comm, comm  # nor are the neighbours
    owned = comm.process_group.owned
    if ("neighbours", ulysses) not in owned:
        first = comm.rank - comm.rank % ulysses
        owned["neighbours", ulysses] = _part(comm, range(first, first + ulysses), "neighbours")
        every = range(comm.rank % ulysses, comm.size, ulysses)
        owned["ring", ulysses] = _part(comm, every, "ring")
    return owned["neighbours", ulysses], owned["ring", ulysses]


def _part(comm: Communicator, ranks: Sequence[int], name: str) -> Communicator:
    """Return a Communicator over some ranks of `comm`, with its options; its members call this."""
    group = comm.process_group
    everyone = group.raw.Get_group()
    chosen = everyone.Incl(list(ranks))
    made = cast(MPI.Intracomm, group.raw).Create_group(chosen)
    chosen.Free()
    everyone.Free()
    try:
        return Communicator(
            made,
            comm.device,
            f"{comm.name}: {name}",
            group.algorithm,
            group.reproducible,
            group.check,
            group.timeout,
            group.segment_bytes,
        )
    finally:
        made.Free()
