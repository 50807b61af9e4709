"""Steps of a GradientSynchronizer that are counted, or that a rank cannot end.

    rank 0   backward ── all buckets ── sync: "rank 1 could not end"  StateError
    rank 1   backward ── error ── fail: the same messages             the error goes on

A rank that fails takes part in the messages of its step all the same, so that none is left over
that a later step could take for its own.
"""

import contextlib
from typing import Any

import numpy as np

from mpipar.errors import (
    CollectiveTimeoutError,
    DestroyedError,
    MpiparError,
    PeerError,
    StateError,
    explain,
)

LOST = (CollectiveTimeoutError, PeerError, DestroyedError)  # nobody may be there to be told


class FailedSteps:
    """The part of a GradientSynchronizer that ends steps by an error, and counts them."""

    def fail(self: Any, error: Exception) -> None:
        """Collective: end a step for which this rank has no gradients, because of `error`.

        The others, for whom it is their `sync`, raise StateError; then the next step can begin.
        After an error that says that others may be gone, nobody is told, and none can.
        """
        if self._link is None or not self._started:
            self._reset()
        elif isinstance(error, LOST):
            self._give_up(error)
        else:
            with contextlib.suppress(MpiparError):
                self._end_step(failed=True)

    def leave(self: Any, error: Exception) -> None:
        """Collective: this rank leaves a counted block because of `error`: the others raise."""
        if self._left or self._broken or self._link is None:
            return  # they know, or cannot be told
        if isinstance(error, LOST):
            self._give_up(error)
            return
        if self._running:
            self.fail(error)
        with contextlib.suppress(MpiparError):
            if (self.count(-1) > 0).any():
                self._end_step(failed=True)

    def count(self: Any, steps: int) -> np.ndarray:
        """Collective: begin a counted step to which this rank adds `steps` gradients; 0 is none.

        Returns the numbers of all ranks.  If they are all 0, nothing has begun.  -1: it leaves by
        an error.

        Raises StateError on every rank if one does and no other has a step.
        """
        self._begin(steps)
        counts = self._wait_for_counts()
        if not (counts > 0).any():
            self._reset()
            self._check_who_left()
        return counts

    def begin_counting(self: Any) -> None:
        """Let each step begin by counting who takes part, until `counted` is unset."""
        self.counted, self._left = True, False
        self.counts = np.full(self.comm.size, self.steps)

    def _give_up(self: Any, error: Exception) -> None:
        """Begin no more steps: messages of this one may still be under way."""
        self._reset()
        self._broken = f"{type(error).__name__}: {error}"

    def _check_who_left(self: Any) -> None:
        """Raise StateError if ranks have left the counted block by an error."""
        gone = np.flatnonzero(self.counts < 0).tolist()
        if gone:
            self._left = True
            rule = f"ranks {gone} of communicator {self.comm.name!r} left the block by an error"
            raise StateError(explain("join", "a step", rule, "See the error there"))
