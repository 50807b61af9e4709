"""`python -m mpipar`: the command `mpipar`."""

import sys

from mpipar.cli.main import main

sys.exit(main())
