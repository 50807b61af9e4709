"""Errors and values on which all ranks of a job agree before they go on.

What only some ranks see (a file missing on one node, another copy of the data) must not leave the
others waiting in the next collective.  `together` runs the same function on every rank and then
exchanges what went wrong; `same` compares a short fingerprint.  Either all ranks return or all
raise the same error, which names the ranks.

    rank 0: ok      rank 1: no such file      rank 2: ok      ->  all: "... no such file (rank 1)"

Cost: one all-gather of short strings by the library.  Used at the start of a job, where nothing
is in flight yet.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import mpipar.errors
from mpipar.errors import MismatchError, MpiparError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def together(world: "MPI.Comm", action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its value, if no rank raised an MpiparError.

    Raises, on every rank, the error of the lowest rank that failed, with the ranks it is of.
    """
    value: list[T] = []
    failure = ("", "")
    try:
        value.append(action())
    except MpiparError as error:
        failure = (type(error).__name__, str(error))
    failures = world.allgather(failure)
    raise_first(failures)
    return value[0]


def raise_first(failures: Sequence[tuple[str, str]]) -> None:
    """Raise the first of each rank's (class name, text); an empty text is no error."""
    first = next((failure for failure in failures if failure[1]), None)
    if first is None:
        return
    name, text = first
    ranks = [rank for rank, failure in enumerate(failures) if failure == first]
    kind = getattr(mpipar.errors, name, MpiparError)
    error = kind(text if len(ranks) == len(failures) else f"{text} ({listed(ranks)})")
    raise mark(error)


def same(world: "MPI.Comm", what: str, fingerprint: str, fix: str) -> None:
    """Check that every rank has the same fingerprint of `what`.

    Raises MismatchError on every rank, naming those that differ from the most common one.
    """
    prints = world.allgather(fingerprint)
    usual = max(prints, key=prints.count)
    odd = [rank for rank, value in enumerate(prints) if value != usual]
    if odd:
        text = f"{what} differs between the ranks: {listed(odd)} against the others. {fix}"
        raise mark(MismatchError(text))


def listed(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def mark(error: MpiparError, speaker: int = 0) -> MpiparError:
    """Note on an error that every rank of the job raises it, so that none is left waiting.

    speaker: the rank that is to print it; not 0 where that one is gone.
    """
    with contextlib.suppress(AttributeError):
        error.of_all_ranks, error.speaker = True, speaker  # type: ignore[attr-defined]
    return error


def is_of_all_ranks(error: BaseException) -> bool:
    """Say whether every rank of the job raises this error."""
    return getattr(error, "of_all_ranks", False)


def speaker_of(error: BaseException) -> int:
    """Return the rank that is to print an error of all ranks."""
    return getattr(error, "speaker", 0)
