"""The most memory that this process had in use since a moment: peak resident set size.

Linux keeps the mark for each process and lets it be set back to what is in use now, so that several
measurements in one process each have their own.
"""

import contextlib
import ctypes
import gc
from pathlib import Path


def forget_peak() -> None:
    """Give unused memory back to the system and set the mark, `torch_gpt.peak_mb`, to what is left.

    Where this is not Linux the mark stays as it is.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # the C library is not GNU's
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
