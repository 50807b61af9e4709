"""What a run tells as it happens, and who listens: the log file, the plot, and the progress bar.

`train` calls a Report; the base class is silent.  Only rank 0 has one that says something.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from mpipar.errors import ConfigError, explain
from mpipar.train.data import Corpus

Row = dict[str, Any]  # a line of the log, by name


@dataclass(frozen=True)
class Facts:
    """What is known of a run before its first step."""

    parameters: int  # of the whole model
    peak: float  # FLOP/s of matrix products on all ranks together
    flops_per_token: float  # forward and backward
    layout: str  # the mesh and what was chosen besides: "dp 2 x tp 2, fsdp 3"
    ranks: int
    corpus: Corpus
    first: int = 1  # step; later than 1 in a run that goes on


class Report:
    """Listens to a run; this one does nothing with what it hears.

    A method that cannot write raises ConfigError.
    """

    def open(self) -> None:
        """Get ready, when settings and data are known to be good; this may empty files."""

    def begin(self, facts: Facts) -> None:
        """Hear what is known before the first step."""

    def step(self, row: Row) -> None:
        """Hear of a finished step."""

    def validation(self, row: Row) -> None:
        """Hear of a measured validation loss."""

    def note(self, text: str) -> None:
        """Hear what the user should know."""

    def stopped(self, row: Row) -> None:
        """Hear that a signal ends the run after a step: {"step", "stopped", "saved"}."""

    def end(self, sample: str) -> None:
        """Hear that the last step is done, and what the model writes."""

    def traced(self, path: str, summary: str) -> None:
        """Hear where the trace is, and what it comes to."""

    def close(self) -> None:
        """Let go of everything, after the end or an error."""


class Several(Report):
    """Passes everything on to several reports, in their order."""

    def __init__(self, reports: Sequence[Report]) -> None:
        """Take the reports."""
        self.reports = tuple(reports)

    def open(self) -> None:
        """Open all."""
        for report in self.reports:
            report.open()

    def begin(self, facts: Facts) -> None:
        """Tell all."""
        for report in self.reports:
            report.begin(facts)

    def step(self, row: Row) -> None:
        """Tell all."""
        for report in self.reports:
            report.step(row)

    def validation(self, row: Row) -> None:
        """Tell all."""
        for report in self.reports:
            report.validation(row)

    def note(self, text: str) -> None:
        """Tell all."""
        for report in self.reports:
            report.note(text)

    def stopped(self, row: Row) -> None:
        """Tell all."""
        for report in self.reports:
            report.stopped(row)

    def end(self, sample: str) -> None:
        """Tell all."""
        for report in self.reports:
            report.end(sample)

    def traced(self, path: str, summary: str) -> None:
        """Tell all."""
        for report in self.reports:
            report.traced(path, summary)

    def close(self) -> None:
        """Close all, the last first."""
        for report in reversed(self.reports):
            report.close()


class Guarded(Report):
    """Passes everything on to a report, until that fails, and remembers why.

    Only rank 0 has a report that writes: an error raised there alone would leave the others waiting
    in the next collective, so the loop lets all ranks know of `failure` when they meet anyway.
    """

    def __init__(self, report: Report) -> None:
        """Take the report."""
        self.report = report
        self.failure = ""

    def begin(self, facts: Facts) -> None:
        """Tell it."""
        self._try(lambda: self.report.begin(facts))

    def step(self, row: Row) -> None:
        """Tell it."""
        self._try(lambda: self.report.step(row))

    def validation(self, row: Row) -> None:
        """Tell it."""
        self._try(lambda: self.report.validation(row))

    def note(self, text: str) -> None:
        """Tell it."""
        self._try(lambda: self.report.note(text))

    def stopped(self, row: Row) -> None:
        """Tell it."""
        self._try(lambda: self.report.stopped(row))

    def end(self, sample: str) -> None:
        """Tell it."""
        self._try(lambda: self.report.end(sample))

    def traced(self, path: str, summary: str) -> None:
        """Tell it."""
        self.report.traced(path, summary)

    def _try(self, tell: Callable[[], None]) -> None:
        if self.failure:
            return
        try:
            tell()
        except ConfigError as error:
            self.failure = str(error)


def unwritable(flag: str, path: str, error: Exception) -> ConfigError:
    """Return the error for an output that cannot be written, found when it was."""
    rule = f"it cannot be written ({getattr(error, 'strerror', None) or error})"
    return ConfigError(explain(flag, path, rule, "Pass another path"))


def _step_of(line: str) -> float:
    """Return the step of a line of a log; infinity for a line that was not written to its end."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _number(value: Any) -> Any:
    """Return None, JSON's null, for a number that JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLog(Report):
    """Writes a line of JSON for each step and each validation, as soon as it is known.

    A run that goes on from a checkpoint leaves the lines of the steps up to that one.
    """

    def __init__(self, path: str, goes_on: bool = False) -> None:
        """Take the path of the file, which `open` makes, and empties unless the run goes on."""
        self.path, self.goes_on = path, goes_on
        self.file: TextIO | None = None

    def open(self) -> None:
        """Open the file; raises ConfigError if it cannot be written."""
        try:
            if not self.goes_on:
                self.file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115
            else:
                self.file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise unwritable("log", self.path, error) from error

    def begin(self, facts: Facts) -> None:
        """Drop the lines of steps that are taken again: those after the checkpoint."""
        if self.file is None or not self.goes_on:
            return
        try:
            self.file.seek(0)
            kept = [line for line in self.file if _step_of(line) < facts.first]
            self.file.truncate(0)
            self.file.writelines(kept)
            self.file.flush()
        except (OSError, ValueError) as error:
            self.close()
            raise unwritable("log", self.path, error) from error

    def step(self, row: Row) -> None:
        """Write a line."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({name: _number(row[name]) for name in row}) + "\n")
            self.file.flush()
        except OSError as error:
            self.close()
            raise unwritable("log", self.path, error) from error

    def validation(self, row: Row) -> None:
        """Write a line."""
        self.step(row)

    def stopped(self, row: Row) -> None:
        """Write a line."""
        self.step(row)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # what is left of a line that could not be written
                self.file.close()
            self.file = None


class Plot(Report):
    """Draws the losses against the step when the run has ended."""

    def __init__(self, path: str) -> None:
        """Take the path of the image; its ending says the format."""
        self.path = path
        self.losses: dict[str, list[tuple[float, float]]] = {"loss": [], "val_loss": []}

    def step(self, row: Row) -> None:
        """Keep a point of the training curve."""
        self.losses["loss"].append((row["step"], row["loss"]))

    def validation(self, row: Row) -> None:
        """Keep a point of the validation curve."""
        self.losses["val_loss"].append((row["step"], row["val_loss"]))

    def stopped(self, row: Row) -> None:
        """Write the image."""
        self.end("")

    def end(self, sample: str) -> None:
        """Write the image."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        labels = {"loss": "training", "val_loss": "held out"}
        for name, style in (("loss", "-"), ("val_loss", "o")):
            points = np.array(self.losses[name], np.float64).reshape(-1, 2)  # (step, loss)
            axes.plot(*points.T, style, label=labels[name])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats a token)")
        axes.grid(alpha=0.3)
        axes.legend()
        try:
            figure.savefig(self.path, dpi=120)
        except OSError as error:
            raise unwritable("plot", self.path, error) from error
