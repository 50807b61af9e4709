"""The part of the test suite that lets pytest run on several MPI ranks; see `plugin.py`."""

import os

# MPICH's blocking calls (Barrier, Split, Dup, ...) give the core away by sched_yield, which with
# more ranks than cores lets a rank spin on while those that it waits for do not run: a Barrier of
# 4 ranks on 2 cores takes some milliseconds.  With this they sleep for an instant, and it takes a
# tenth.  MPICH reads it when it starts, so it is set before anything of the suite imports MPI.
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
