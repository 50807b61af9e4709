"""The findings as a table for a person, and as JSON for a program."""

import json
from collections.abc import Sequence
from typing import Any

from mpipar.doctor.finding import Finding, worst

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def table(findings: Sequence[Finding]) -> None:
    """Print the findings on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mpipar.train import terminal

    shown = Table(show_lines=False, pad_edge=False)
    for name in ("check", "verdict", "what was found"):
        shown.add_column(name, overflow="fold", no_wrap=name != "what was found")
    for finding in findings:
        words = Text(finding.words)
        if finding.fix:
            words.append(f"\n-> {finding.fix}", style="italic")
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        shown.add_row(finding.name, verdict, words)
    columns = terminal.width()  # Open MPI's ranks write to a terminal of their own
    console = Console(force_terminal=columns is not None, width=columns or 110, highlight=False)
    console.print(shown)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in STYLES}
    told = [
        f"{number} {verdict}{'s' * (number != 1 and verdict != 'ok')}"
        for verdict, number in counts.items()
        if number
    ]
    console.print(", ".join(told))


def as_json(findings: Sequence[Finding], machine: dict[str, Any]) -> str:
    """Return {"verdict": ..., "machine": {...}, "checks": [...]} as text."""
    checks = [
        {"name": f.name, "verdict": f.verdict, "words": f.words, "fix": f.fix, "facts": f.facts}
        for f in findings
    ]
    return json.dumps({"verdict": worst(findings), "machine": machine, "checks": checks}, indent=1)
