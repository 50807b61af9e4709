"""Memory that one step frees is there for the next one, instead of going back to the system.

A step allocates and frees the same arrays again and again.  GNU's malloc gives large ones back at
once, and the system clears every page of the next ones: 24,000 page faults, 7 to 10 % of the time
of a step of the benchmark's GPT.  The most memory in use stays the same.
"""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE, OLD_LIMIT = 1 << 30, 1 << 25  # bytes; what versions of the library before 2.35 take at most


def keep_freed() -> None:
    """Let this process keep what it frees, up to 2 GiB; nothing where the C library is not GNU's.

    Arrays up to 1 GiB come from the heap instead of from mappings of their own.
    """
    with contextlib.suppress(OSError, AttributeError):
        option = ctypes.CDLL(None).mallopt
        if not option(M_MMAP_THRESHOLD, LARGE):
            option(M_MMAP_THRESHOLD, OLD_LIMIT)
        option(M_TRIM_THRESHOLD, 2**31 - 1)
