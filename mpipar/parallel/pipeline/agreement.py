"""What the ranks of a pipeline tell each other before they send anything else.

Every rank sees a part: the first has the inputs, the last the targets, one alone may lack a file.
`exchange` gathers a few numbers and whether something is wrong anywhere; then all ranks raise the
same error, and none is left waiting.  Cost: one small all_gather, two if there is an error.
"""

from collections.abc import Sequence

import numpy as np

import mpipar.errors
from mpipar.errors import MpiparError
from mpipar.parallel.communicator import Communicator


def exchange(
    comm: Communicator, numbers: Sequence[int], error: MpiparError | None = None
) -> np.ndarray:
    """Return every rank's numbers, int64 (ranks, count), if no rank has an error.

    Collective.  Raises the error of the lowest rank that has one, on every rank.
    """
    text = b"" if error is None else f"{type(error).__name__}\n{error}".encode()
    mine = np.array([[*numbers, len(text)]], np.int64)
    table = comm.all_gather(mine, dim=0) if comm.size > 1 else mine
    longest = int(table[:, -1].max())
    if longest:
        texts = np.zeros((1, longest), np.uint8)
        texts[0, : len(text)] = np.frombuffer(text, np.uint8)
        texts = comm.all_gather(texts, dim=0) if comm.size > 1 else texts
        raise _first([row.tobytes().rstrip(b"\0").decode() for row in texts], error)
    return table[:, :-1]


def _first(texts: list[str], own: MpiparError | None) -> MpiparError:
    """Return the error of the lowest rank that has one, with the same text on every rank.

    It is the object itself where all ranks have the same.
    """
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    if own is not None and all(other == text for other in texts):
        return own
    name, _, message = text.partition("\n")
    kind = getattr(mpipar.errors, name, MpiparError)
    return kind(f"{message} (rank {rank})")
