"""Where the time of a job goes: spans, their recording, files, one picture of all ranks, a summary.

    spans.py     Span and Timeline: what simulations predict and pictures show
    record.py    what every layer tells while a trace is taken
    parts.py     one file a rank, written as the run goes
    chrome.py    all parts in one file, which Perfetto and Chrome show
    summary.py   step time, exposed communication, bubble, imbalance and the slowest rank

Nothing here knows MPI; `mpipar.Trace` joins it with the ranks of a job.
"""

from mpipar.trace.spans import Span, Timeline

__all__ = ["Span", "Timeline"]
