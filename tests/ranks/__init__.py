"""The part of the test suite that lets pytest run on several MPI ranks; see `plugin.py`."""
