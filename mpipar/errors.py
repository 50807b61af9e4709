"""The exceptions a user can catch.

Every message follows one pattern, built by `explain`: the parameter, its value, the rule it breaks
and how to fix it.  Each class also derives from the built-in exception a reader would expect.
"""


class MpiparError(Exception):
    """Base of every error that mpipar raises on purpose."""


class ConfigError(MpiparError, ValueError):
    """A setting, size or path given by the user cannot work."""


class ScheduleError(MpiparError, ValueError):
    """A schedule is not correct; the message names the round, the ranks and the chunk."""


class BufferMismatchError(MpiparError, ValueError):
    """An array does not fit where it should go: shape, size, contiguity, or a message's length."""


class MismatchError(MpiparError, ValueError):
    """The ranks of a group called collectives that do not belong together."""


class DtypeMismatchError(MpiparError, TypeError):
    """The ranks of a group passed different dtypes, or a dtype that the operation cannot take."""


class CollectiveTimeoutError(MpiparError, TimeoutError):
    """A wait went past the communicator's time limit; the message names who waits for whom."""


class PeerError(MpiparError, ConnectionError):
    """MPI reports a failure while ranks communicate: a peer may be gone."""


class CheckpointError(MpiparError, OSError):
    """A checkpoint cannot be written, is not there, or is damaged; the message names the file."""


class DestroyedError(MpiparError, RuntimeError):
    """A communicator was used after `destroy()`."""


class StateError(MpiparError, RuntimeError):
    """A method was called at a time when it cannot work: before `start()`, or twice in a step."""


class GraphError(MpiparError, RuntimeError):
    """The autograd graph cannot be used this way, for example a second backward through it."""


class NonFiniteError(MpiparError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""


def explain(parameter: str, value: object, rule: str, fix: str) -> str:
    """Return the text of an error: which parameter, its value, the rule, and the fix."""
    return f"{parameter}={value!r}: {rule}. {fix}"
