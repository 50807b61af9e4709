"""All_reduce in memory that the ranks of a node share: read, add, and let everybody read.

One node of four ranks; every rank's vector lies where all can read it:

    round 0     rank 2 reads chunk 2 of ranks 0, 1 and 3 and adds:   x0 + x1 + x2 + x3
    round 1     everybody reads the sum from there: no copy, if the result lies once in a node

Several nodes: between the two, the ranks that own the same chunks exchange their sums across the
nodes, by halving-doubling.  So these are the rounds of the hierarchical schedule, with reads in
place of the messages inside a node:

    read        0 <-> 1    2 <-> 3      0 and 2 own shard 0, 1 and 3 own shard 1
    across      0 <-> 2    1 <-> 3
    read        0 <-> 1    2 <-> 3

Operands inside a node are added in rank order, and nodes in the order of nodes.  (Shared windows:
MPI-3.1, section 11.2.3; Hoefler et al., "MPI + MPI", 2013.  Two levels: Mikami et al. 2018.)

Cost for n bytes, L ranks on each of N nodes: every byte of the node's L vectors is read once and n
bytes are written, in two waits inside the node; 2 log2 N alpha + 2 (N-1)/N n/L beta across.
"""

from collections.abc import Iterator

from mpipar.schedule.classes import two_level
from mpipar.schedule.core import Op, Read, ReadReduce, Recv, Round, Send
from mpipar.schedule.hierarchical import all_reduce as by_messages
from mpipar.schedule.hierarchical import chunk_count, starts
from mpipar.schedule.registry import register


@register(
    "all_reduce",
    "window",
    "each rank adds its block of all vectors of the node, in shared memory; across nodes, messages",
    chunks=chunk_count,
    ordered=True,
    options=("nodes",),
    symmetry=two_level,
    shared=True,
)
def all_reduce(p: int, rank: int, nodes: tuple[int, ...]) -> Iterator[Round]:
    """Yield a round of reading and adding, the rounds across the nodes, and a round of reading.

    A rank alone on its node has nothing to read, but keeps the rounds: they are numbered alike.
    """
    first = max(start for start in starts(nodes) if start <= rank)
    local = range(first, first + nodes[starts(nodes).index(first)])
    for ops in by_messages(p, rank, nodes):
        yield tuple(op for op in (_in_memory(op, local) for op in ops) if op is not None)


def _in_memory(op: Op, local: range) -> Op | None:
    """Return the operation with a read in place of a message inside the node."""
    if op.peer not in local:
        return op
    if type(op) is Send:
        return None
    return Read(*op) if type(op) is Recv else ReadReduce(*op)
