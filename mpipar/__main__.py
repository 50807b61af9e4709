"""`python -m mpipar`: the command `mpipar`."""

import sys

if __name__ == "__main__":
    from mpipar.cli.main import main

    sys.exit(main())
