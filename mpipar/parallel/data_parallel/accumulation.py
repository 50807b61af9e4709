"""Accumulation of gradients by hand: the part of DataParallel that adds up sets of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd.engine import accumulate
from mpipar.errors import BufferMismatchError, StateError, explain


class Accumulation:
    """What a DataParallel adds up before it reduces."""

    def start_accumulation(self: Any) -> None:
        """Clear the gradients and begin to add up `accumulation_steps` of them.

        Until they are complete, backward communicates nothing.
        """
        self.module.zero_grad()
        self._aside.clear()
        self._by_hand, self._done = True, 0

    def accumulate_gradients(
        self: Any, gradients: Mapping[str, Array] | Sequence[Array | None] | None = None
    ) -> bool:
        """Count one more set of gradients; reduce them all if it was the last.

        gradients: None if backward has added them to the parameters; else one array (or None) for
        each of `parameters()`, or a dict by the names of `state_dict`.  Returns whether this was
        the last: then `.grad` has the mean over ranks and sets, and start_accumulation() comes
        next.  Collective then.

        Raises StateError if not started, BufferMismatchError if the gradients do not fit.
        """
        if not self._by_hand:
            rule, fix = "it comes after start_accumulation()", "Call start_accumulation() first"
            raise StateError(explain("accumulate_gradients", "not started", rule, fix))
        if gradients is not None:
            self._add(gradients)
        self._done += 1
        if self._done < self.accumulation_steps:
            return False
        self._by_hand, self._done, self._expected = False, 0, False
        self._reduce()
        return True

    def _add(self: Any, gradients: Mapping[str, Array] | Sequence[Array | None]) -> None:
        named = dict(self.module.named_parameters())
        if not isinstance(gradients, Mapping):
            if len(gradients) != len(named):
                rule = f"there is one for each of {len(named)} parameters"
                fix = "Pass None for those without"
                raise BufferMismatchError(explain("len(gradients)", len(gradients), rule, fix))
            gradients = {n: g for n, g in zip(named, gradients, strict=True) if g is not None}
        for name, grad in gradients.items():
            shape = named[name].data.shape if name in named else "no such parameter"
            if grad.shape != shape:
                rule = f"the parameter has {shape}"
                raise BufferMismatchError(explain(name, grad.shape, rule, "Pass that shape"))
        for name, grad in gradients.items():
            accumulate(named[name], grad, False)
