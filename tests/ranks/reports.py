"""What the ranks tell each other about one test, and the one outcome they make of it."""

from dataclasses import dataclass
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr
from _pytest._io import TerminalWriter

LONGEST_TEXT = 20_000  # characters of one rank's error and output


@dataclass(frozen=True)
class Failure:
    """One phase of a test that failed on one rank."""

    rank: int
    phase: str  # setup, call or teardown
    message: str  # one line
    text: str  # traceback and captured output


def failures(rank: int, reports: list[pytest.TestReport]) -> list[Failure]:
    """Return what failed in the reports of this rank."""
    return [
        Failure(rank, report.when or "", message(report), _text(report))
        for report in reports
        if report.failed
    ]


def agree(reports: list[pytest.TestReport], failed: list[Failure]) -> None:
    """Make this rank's reports say that the test failed, with the errors of all ranks."""
    if not failed:
        return
    phases = [report.when for report in reports]
    own = [report for report in reports if report.failed]
    first = own[0] if own else reports[phases.index("call") if "call" in phases else -1]
    first.outcome = "failed"
    first.longrepr = RanksError(failed)
    first.sections = []  # they are part of the text of each rank


class RanksError(TerminalRepr):
    """The errors of all ranks as pytest prints them; ranks with the same error share one text."""

    def __init__(self, failed: list[Failure]) -> None:
        self.groups: dict[tuple[str, str], list[int]] = {}
        for failure in sorted(failed, key=lambda failure: failure.rank):
            self.groups.setdefault((failure.phase, failure.text), []).append(failure.rank)
        ranks = sorted({failure.rank for failure in failed})
        self.reprcrash = _Crash(f"on {_ranks(ranks)}: {failed[0].message}")

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text of each rank."""
        for (phase, text), ranks in self.groups.items():
            where = "" if phase == "call" else f" in {phase}"
            tw.sep("-", f"failed on {_ranks(ranks)}{where}", bold=True)
            tw.line(text)


@dataclass(frozen=True)
class _Crash:
    """What pytest's short summary shows."""

    message: str


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def message(report: pytest.TestReport) -> str:
    """Return the first line of the error of a failed report."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).splitlines()
    return lines[0] if lines else ""


def _text(report: pytest.TestReport) -> str:
    parts = [report.longreprtext]
    parts += [f"--- {title} ---\n{content}" for title, content in report.sections if content]
    text = "\n".join(parts)
    cut = len(text) - LONGEST_TEXT
    return text if cut <= 0 else f"({cut} characters left out)\n{text[-LONGEST_TEXT:]}"
