"""Writing the files that a command was asked for."""

from pathlib import Path

from mpipar.errors import ConfigError, explain


def write(path: Path, words: str, flag: str) -> None:
    """Write a text file and say so.  Raises ConfigError, naming the flag, if it cannot be."""
    try:
        path.write_text(words, encoding="utf-8")
    except OSError as error:
        rule = f"the file cannot be written: {error.strerror}"
        raise ConfigError(explain(flag, str(path), rule, "Name another file")) from None
    print(f"wrote {path}")
