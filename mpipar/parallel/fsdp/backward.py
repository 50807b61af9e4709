"""The backward that runs, and what is left of one that ended with an exception.

    backward   reduce 2, 1 | exception            caught, on every rank
    forward    reduce 1, 0: all have the same in flight again; drop the sums; go on

Such a backward leaves whole gradients, and messages that other ranks may not have posted yet.  So
all ranks post the rest, when they come by next, and drop what arrives.  Shards keep the gradients
that they had before.
"""

from mpipar.autograd.tape import failures
from mpipar.errors import StateError, explain
from mpipar.parallel.fsdp.gather import Gatherer
from mpipar.parallel.fsdp.reducer import Reducer


class Backward:
    """See the module.  expected: whether the backward that runs is one of this FSDP."""

    def __init__(self, gatherer: Gatherer, reducer: Reducer) -> None:
        self._gatherer, self._reducer = gatherer, reducer
        self.expected = False
        self._failures = 0  # of all backwards, before this one
        self._adds = False  # it adds to whole gradients of others
        self._lost = False  # those went with it

    def begin(self, quiet: bool) -> None:
        """One of this FSDP begins, or goes on; quiet: no sync follows it."""
        self.recover()
        if not self.expected:
            self._failures, self._adds = failures(), self._reducer.is_pending
        self.expected = self._gatherer.backward = True
        self._reducer.quiet = quiet

    def recover(self) -> None:
        """Collective: drop what is left of a backward that ended with an exception.

        Raises StateError if gradients that were added up under `no_sync` went with it.
        """
        if self.expected and self._failures != failures():
            self.expected, self._lost = False, self._adds
            self._gatherer.rest()
            self._reducer.abort()
        if self._lost:
            rule = "gradients that were added up under no_sync are lost after an exception"
            raise StateError(explain("backward", "aborted", rule, "Begin anew with zero_grad()"))

    def forget(self) -> None:
        """Nobody misses the gradients that there were."""
        self._adds = self._lost = False
