"""The messages of a pipeline: activations to the next stage, their gradients back.

    stage 0                       stage 1
    SEND_F  header, x0  ───────▶  RECV_F  header         of the first micro-batch of its size only:
    SEND_F  x1          ───────▶  RECV_F  x1             what comes is known from then on
    RECV_B  g0          ◀───────  SEND_B  g0             a gradient is like its activation

Everything is posted without waiting, where the lowered schedule lists it; `take` waits for what an
action needs, `finish` for the sends.  The order of the messages between two ranks is the same at
both ends, so they need no tags.  A receive whose shape is not known yet asks for the header only.
The rest follows when the action comes to need it, or before the next receive from the same rank is
posted.  This cannot wait for ever, as the header was sent by an action that comes before this one
in the order in which the schedule was lowered.
"""

from typing import Any

import numpy as np

from mpipar.arrays import Array
from mpipar.arrays import dtype as dtype_of
from mpipar.autograd.tensor import is_float
from mpipar.errors import BufferMismatchError, ConfigError, DtypeMismatchError, explain
from mpipar.parallel.communicator import Communicator
from mpipar.schedule.pipeline import Action

HEADER = 16  # int64: number of the dtype, of dimensions, then the shape
FLOATS = ("float64", "float32", "float16", "bfloat16")
Form = tuple[tuple[int, ...], np.dtype]  # shape and dtype
Key = tuple[int, int, int]  # kind of input, border (the stage behind it), rows


class Messages:
    """Posts and completes the messages of one rank; see the module."""

    def __init__(self, comm: Communicator) -> None:
        """Use a communicator that has no other messages between two ranks."""
        self._comm = comm
        self._input = 0
        self._forms: dict[Key, Form] = {}
        self._asked: set[Key] = set()
        self._unknown: dict[int, list[tuple[Action, Key, Any]]] = {}  # by source
        self._receives: dict[Action, Any] = {}
        self._sends: list[Any] = []

    def begin(self, kind: int) -> None:
        """Begin a step whose inputs are of this kind: a number for their shapes and dtypes."""
        self._input = kind

    def send(self, action: Action, x: Array, dst: int, rows: int) -> None:
        """Start to send what F or B made."""
        self._sends = [handle for handle in self._sends if not handle.test()]  # memory is freed
        if action.kind == "SEND_F":
            self._announce(action, x, dst, rows)
        self._sends.append(self._comm.send(x, dst, async_op=True))

    def receive(self, action: Action, src: int, rows: int) -> None:
        """Make ready for the activations of a micro-batch."""
        key = (self._input, action.stage, rows)
        self._post_unknown(src)
        if key in self._forms:
            self._post(action, self._forms[key], src)
            return
        header = None
        if key not in self._asked:
            self._asked.add(key)
            header = self._comm.recv((HEADER,), np.int64, src, async_op=True)
        self._unknown.setdefault(src, []).append((action, key, header))

    def receive_like(self, action: Action, form: Form, src: int) -> None:
        """Make ready for the gradient of something of this shape and dtype."""
        self._post_unknown(src)
        self._post(action, form, src)

    def take(self, action: Action, src: int) -> Array:
        """Wait for what a receive gets, and return it: memory of its own."""
        if action not in self._receives:
            self._post_unknown(src)
        return self._receives.pop(action).wait()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for handle in self._sends:
            handle.wait()
        self._sends.clear()

    def _post(self, action: Action, form: Form, src: int) -> None:
        self._receives[action] = self._comm.recv(*form, src, async_op=True)

    def _post_unknown(self, src: int) -> None:
        """Post the receives that waited for a header of `src`."""
        for action, key, header in self._unknown.pop(src, []):
            if header is not None:
                self._forms[key] = _read(np.asarray(_host(header.wait())))
            self._post(action, self._forms[key], src)

    def _announce(self, action: Action, x: Array, dst: int, rows: int) -> None:
        """Send a header before the first activations of a size; check all others against it."""
        key, form = (self._input, action.stage + 1, rows), (tuple(x.shape), x.dtype)
        known = self._forms.get(key)
        if known is None:
            header = _header(action, x)
            self._forms[key] = form
            self._sends.append(self._comm.send(header, dst, async_op=True))
        elif known != form:
            rule = f"for inputs of this shape stage {action.stage} gave {known} before"
            fix = "A stage's output depends on the shape of its input alone"
            raise BufferMismatchError(explain("output", form, rule, fix))


def _host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x


def _header(action: Action, x: Array) -> np.ndarray:
    if not is_float(x.dtype):
        rule = f"what stage {action.stage} passes on must be floating-point"
        fix = "Convert it, or cut the model elsewhere"
        raise DtypeMismatchError(explain("output.dtype", x.dtype.name, rule, fix))
    if x.ndim > HEADER - 2:
        rule = f"what stage {action.stage} passes on has at most {HEADER - 2} dimensions"
        raise ConfigError(explain("output.ndim", x.ndim, rule, "Reshape it"))
    header = np.zeros(HEADER, np.int64)
    header[:2] = FLOATS.index(x.dtype.name), x.ndim
    header[2 : 2 + x.ndim] = x.shape
    return header


def _read(header: np.ndarray) -> Form:
    number, ndim = header[:2].tolist()
    return tuple(header[2 : 2 + ndim].tolist()), dtype_of(FLOATS[number])
