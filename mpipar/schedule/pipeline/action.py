"""What one rank of a pipeline does in one step: an action, printed and read as short text.

    2F0       stage 2 runs the forward pass of micro-batch 0
    1B3       stage 1 runs the backward pass of micro-batch 3
    0W1       stage 0 computes the weight gradients of micro-batch 1

What B means depends on the schedule: without any W it is the whole backward pass; in a schedule
with W it is the gradient of the stage's input only, and the gradient of its weights is left to the
W of the same stage and micro-batch.  A schedule splits all of its backward passes or none.

Lowering adds messages, each named by the stage at its own end:

    2SEND_F0  stage 2 starts to send its output to stage 3     3RECV_F0  stage 3 makes ready for it
    3SEND_B0  stage 3 starts to send its input's gradient      2RECV_B0  stage 2 makes ready for it
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from mpipar.errors import ScheduleError, explain

COMPUTE = {"F": "forward", "B": "backward", "W": "weight"}  # and the kinds of their spans
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
KINDS = (*COMPUTE, *SENDS, *RECEIVES)

_WORD = re.compile(r"([0-9]{1,9})(" + "|".join((*KINDS, "I")) + r")([0-9]{1,9})")


class Action(NamedTuple):
    """One step: a stage of the model, what it does, and the micro-batch."""

    stage: int
    kind: str  # one of KINDS
    microbatch: int

    def __str__(self) -> str:
        """Return the text that `parse_action` reads: `2F0`."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """Whether it is F, B or W, and no message."""
        return self.kind in COMPUTE


def parse_action(word: str) -> Action:
    """Return the action that a word like `2F0` names.

    The kind I, the input gradient of a split backward pass, is read too, for files of others.
    Raises ScheduleError for any other word.
    """
    found = _WORD.fullmatch(word)
    if not found:
        rule = f"an action is stage, kind ({' '.join(KINDS)}), micro-batch"
        raise ScheduleError(explain("action", word, rule, "Write it like 2F0, 1B3 or 0W1"))
    return Action(int(found[1]), found[2], int(found[3]))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return the actions of one rank, from words like `0F0 0F1 0B0 0B1`; see `without_i`."""
    (row,) = without_i([list(map(parse_action, text.split()))])
    return row


def without_i(rows: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Return the ranks' actions in the kinds that are used here.

    In files of others, I may be the gradient of the input.  If one is there, B means the whole
    backward pass: I becomes B, and B becomes B followed by W.
    """
    if not any(action.kind == "I" for row in rows for action in row):
        return tuple(map(tuple, rows))
    becomes = {"I": "B", "B": "BW"}
    return tuple(
        tuple(
            action._replace(kind=kind)
            for action in row
            for kind in (becomes.get(action.kind) or (action.kind,))
        )
        for row in rows
    )
