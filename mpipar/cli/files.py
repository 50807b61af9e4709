"""Writing the files that a command was asked for."""

from pathlib import Path

from mpipar.errors import ConfigError, explain
from mpipar.train.outputs import refusal


def check(path: Path | None, flag: str) -> None:
    """Raise ConfigError, naming the flag, if a file cannot be written; before work is done."""
    if path is not None and (reason := refusal(path)) is not None:
        raise ConfigError(explain(flag, str(path), reason, "Name another file"))


def write(path: Path, words: str, flag: str) -> None:
    """Write a text file and say so.  Raises ConfigError, naming the flag, if it cannot be."""
    try:
        path.write_text(words, encoding="utf-8")
    except OSError as error:
        rule = f"the file cannot be written: {error.strerror}"
        raise ConfigError(explain(flag, str(path), rule, "Name another file")) from None
    print(f"wrote {path}")
