"""One step: gradients of the global batch, what the ranks make of them, and the update.

    rank 0   learn ── loss, norm ─┐                         ┌─ update
    rank 1   learn ── loss, nan  ─┴─ max of what was seen  ─┴─ all skip it, or none does

A step whose loss or gradient is not finite on some rank is left out on all: weights, moments,
masters of 16 bits and the optimiser's counts stay as they were.  It has its number all the same, so
that data and learning rate of the next one are what they would have been.  Too many in a row end
the run: the weights are at fault then, and what is saved meanwhile would be too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpipar.errors import MpiparError, NonFiniteError, explain
from mpipar.models.transformer import IGNORE
from mpipar.parallel.clip import clip_factor, clip_grad_norm
from mpipar.parallel.mesh import Mesh
from mpipar.trace.record import phase
from mpipar.train.agree import mark, raise_first
from mpipar.train.data import Rows
from mpipar.train.held import Held
from mpipar.train.signals import Signals


class Taken(NamedTuple):
    """What came of a step, the same on every rank."""

    loss: float  # the mean of the global batch
    norm: float  # of its gradient, before clipping
    tokens: int  # that count
    wrong: str  # "loss" or "grad_norm", if that is not finite and the update was left out
    asked: int  # the number of a signal that asks for a stop, or 0


def train_step(
    step: int,
    parts: Sequence[Rows],
    held: Held,
    optimizer: Any,
    mesh: Mesh,
    clip: float,
    failure: str = "",
    signals: Signals | None = None,
    commit: Callable[[], None] | None = None,
) -> Taken:
    """Take one step over this rank's micro-batches.

    signals: what may ask this rank for a stop.  commit: called before the update.

    Raises ConfigError on every rank if `failure`, what went wrong with this rank's report, is not
    empty on any.
    """
    tokens = count_tokens(parts, held)
    optimizer.zero_grad()
    with np.errstate(over="ignore", invalid="ignore"):  # see judge
        terms = [held.learn(rows, step, tokens, rows is parts[-1]) for rows in parts]
        loss = float(held.data.all_reduce(np.array([sum(terms)]))[0])
        with phase("norm of gradients"):
            norm = clip_grad_norm(held.parameters(), None, mesh)
    wrong, asked = judge(loss, norm, mesh, failure, signals.asked if signals else 0)
    if commit is not None:
        commit()
    if not wrong:
        with phase("update"):
            optimizer.step(clip_factor(norm, clip) if clip else 1.0)
    return Taken(loss, norm, tokens, wrong, asked)


def count_tokens(parts: Sequence[Rows], held: Held) -> int:
    """Return the number of valid targets in the global batch."""
    mine = sum(np.count_nonzero(rows.targets != IGNORE) for rows in parts)
    return int(held.data.all_reduce(np.array([mine], np.int64))[0])


def judge(loss: float, norm: float, mesh: Mesh, failure: str, asked: int) -> tuple[str, int]:
    """Collective: let all ranks know what any has seen.

    Returns what is not finite on some rank, "loss", "grad_norm" or "", and the signal that came, or
    0.  Raises ConfigError on every rank if `failure` is not empty on any.
    """
    seen = [not math.isfinite(loss), not math.isfinite(norm), failure != "", asked]
    bad_loss, bad_norm, failed, asked = mesh.world.all_reduce(np.array(seen, np.int32), op="max")
    if failed:
        require_told(failure, mesh)
    return "loss" if bad_loss else "grad_norm" if bad_norm else "", int(asked)


def require_told(failure: str, mesh: Mesh) -> None:
    """Raise ConfigError on every rank if a report failed on any."""
    raise_first(mesh.world.process_group.raw.allgather(("ConfigError", failure)))


class Streak:
    """Counts the steps that were skipped: count, of the whole run; in_row, the latest ones."""

    def __init__(self, most: int) -> None:
        """Take how many in a row end the run."""
        self.most, self.count, self.in_row = most, 0, 0

    def after(self, taken: Taken) -> int:
        """Take note of a step; return the count."""
        self.in_row = self.in_row + 1 if taken.wrong else 0
        self.count += taken.wrong != ""
        return self.count

    @property
    def is_too_long(self) -> bool:
        """Whether the run has to end."""
        return self.in_row >= self.most

    def at_the_end(self, folder: str | None) -> str:
        """Return what to tell where a run ends with skipped steps; folder: where it saves."""
        text = f"the last steps, {self.in_row}, were skipped: loss or gradient was not finite"
        if folder is not None:
            text += f". What is saved now may lead to more of them: older ones in {folder} are kept"
        return text

    def error(self, step: int, taken: Taken, good: Any) -> MpiparError:
        """Return what to raise on every rank; good: the last checkpoint before these steps."""
        value = taken.loss if taken.wrong == "loss" else taken.norm
        rule = f"it is not finite in step {step}"
        if self.most > 1:
            rule += f", the last of {self.most} in a row that were skipped"
        fix = "a lower --lr, a longer --warmup, or --clip 1"
        fix = (
            f"Go on with --resume {good}, the last good checkpoint, and {fix}"
            if good
            else (f"No checkpoint is older than that; try {fix}")
        )
        return mark(NonFiniteError(explain(taken.wrong, value, rule, fix)))
