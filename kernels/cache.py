"""The user's cache folder for machine code, and locks between the processes of a machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "mpipar"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between the processes of a machine, where the file system has them."""
    with path.open("w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
