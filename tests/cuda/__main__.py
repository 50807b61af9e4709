"""Run the cases of some operations: `python -m tests.cuda MODULE numpy|cupy tiny|large`."""

import importlib
import sys

if __name__ == "__main__":
    module, xp, sizes = sys.argv[1:]
    importlib.import_module(f"tests.cuda.{module}").run(importlib.import_module(xp), sizes)
