"""`mpipar trace`: where the time of a traced training went, by rank.

    mpiexec -n 4 mpipar train --trace runs/trace
    mpipar trace runs/trace

Of a run that died, it first makes trace.json of what the ranks had written until then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from mpipar.trace import chrome
from mpipar.trace.summary import summarise

__all__ = ["ALONE", "Config", "run"]


@dataclass(frozen=True)
class Config:
    """Sum up a trace: step time, exposed communication by axis, idle time of the pipeline, and who
    was late, by rank."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """Folder of mpipar train --trace or mp.Trace, or the file trace.json in it."""


ALONE = (Config,)


def run(config: Config) -> int:
    """Print the summary; return the exit code."""
    path = chrome.find(config.path)
    print(f"{summarise(path).text()}\n\ntrace: {path} (shown by ui.perfetto.dev)")
    return 0
