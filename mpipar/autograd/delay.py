"""Delay: backward in two parts, the gradients of some leaves put off until later.

Zero-bubble pipelines (Qi et al. 2023) compute the gradient of a stage's input first, because the
stage before waits for it, and the gradients of the weights when there is time:

    x --linear(w1)--> h --linear(w2)--> y

    backward in a Delay   dh = dy w2     dx = dh w1            keeps x, h and dh, dy
    run()                 w2.grad += dy' h     w1.grad += dh' x

What is put off are the products of `linear`, and all of an operation's vjps that go to one such
leaf alone (`matmul`, additions).  What costs little and shares its work with the gradient of the
input (norms), or has none (embeddings), runs at once.  The numbers are those of one backward.
"""

from collections.abc import Iterable
from typing import Any

from mpipar.arrays import Array
from mpipar.autograd.engine import deliver, is_fresh, used
from mpipar.autograd.tape import Source, state


class Delay:
    """As a context manager: backward in the block puts off gradients of `leaves`, until `run`.

        with Delay(model.parameters()) as delay:
            loss.backward()
        ...
        delay.run()

    The hooks of a leaf fire when its gradient is complete, in `run` if a part was put off, and what
    `after_backward` calls is called at the end of `run`.  One backward a Delay.
    """

    __slots__ = ("_counts", "_outer", "_work", "leaves")

    def __init__(self, leaves: Iterable[Any]) -> None:
        """Name the leaves; others get their gradients at once."""
        self.leaves = frozenset(leaves)
        self._outer: Delay | None = None
        self._work: list[tuple[tuple[Source, ...], Any, Array]] = []
        self._counts: dict[Any, int] = {}

    def __enter__(self) -> "Delay":
        """Put off from here on."""
        self._outer, state.delay = state.delay, self
        return self

    def __exit__(self, *error: object) -> None:
        """Go back to what was before."""
        state.delay, self._outer = self._outer, None

    def begin(self, counts: dict[Any, int]) -> None:
        """Take the uses of leaves with hooks that a backward is about to count down."""
        self._counts = counts

    def add(self, leaves: tuple[Source, ...], vjp: Any, grad: Array) -> None:
        """Put off `vjp(grad)`, a tuple with one gradient (or None) for each leaf; called by vjps.

        The leaf counts as in use until then.
        """
        self._work.append((leaves, vjp, grad))
        for leaf in leaves:
            if leaf in self._counts:
                self._counts[leaf] += 1  # backward takes one off when it is done with the node

    def run(self) -> None:
        """Compute what was put off, in the order of backward, and end the backward."""
        before, state.enabled = state.enabled, False
        pumps = state.pumps
        self._work.reverse()
        try:
            while self._work:
                leaves, vjp, grad = self._work.pop()
                for leaf, new in zip(leaves, vjp(grad), strict=True):
                    if leaf is not None and new is not None:
                        deliver(leaf, new, is_fresh(new, grad))
                del vjp, grad
                for leaf in leaves:
                    if leaf is not None:
                        used(leaf, self._counts)
                for pump in pumps:
                    pump()
        except BaseException:
            state.failures += 1
            raise
        finally:
            state.enabled = before
        for end in tuple(state.ends):
            end()
