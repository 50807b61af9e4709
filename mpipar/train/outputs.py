"""The files a run was asked to write: can they be, and are they none of those that it reads?

Nothing here opens a file for writing, so that a mistake in another setting leaves an older log as
it was.  What only the first byte shows, such as a full disk, is seen when it is written.
"""

import os
import sys
from pathlib import Path


def refusal(path: Path) -> str | None:
    """Say why a file cannot be written, or return None; the file system is not changed."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists():
            return None if os.access(path, os.W_OK) else "it must not be write-protected"
        if not path.absolute().parent.is_dir():
            return f"there is no folder {path.absolute().parent}"
        if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            return f"nothing can be written in the folder {path.absolute().parent}"
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        return f"it cannot be the name of a file ({getattr(error, 'strerror', None) or error})"
    return None


def is_part_of(path: Path, data: Path) -> bool:
    """Say whether `path` is the file `data`, by whatever name, or lies in the folder `data`."""
    try:
        if path.exists() and data.exists() and path.samefile(data):
            return True
        here, there = path.resolve(), data.resolve()
    except (OSError, ValueError, RuntimeError):
        return False
    return here == there or (there.is_dir() and there in here.parents)


def silence_stdout() -> None:
    """Let nothing more be written to standard output, nor fail when Python flushes it at the end.

    For when its reader has left, as `head` does, or its disk is full.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    finally:
        os.close(nowhere)
