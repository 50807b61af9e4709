"""What a check found: a verdict, the measured facts, and what to do.

A check has two halves.  `probe` runs on every rank, may communicate, and returns plain facts;
`judge` is a pure function of the facts of all ranks, which rank 0 calls:

    rank 0: facts --\
    rank 1: facts ---> judge(facts of all, job) -> Finding(verdict, words, fix)
    rank 2: facts --/
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from mpipar.doctor.machine import Machine

Verdict = Literal["ok", "note", "problem"]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One line of the table; `facts` go into the JSON file."""

    name: str
    verdict: Verdict
    words: str
    fix: str = ""
    facts: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Where the ranks are: `hosts[r]` is the name of rank r's host, `node_of[r]` its number."""

    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    crowded: bool = False  # more ranks than cores somewhere: times say little

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        count = max(self.node_of) + 1
        return [[r for r, node in enumerate(self.node_of) if node == n] for n in range(count)]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.nodes]

    def where(self, node: int) -> str:
        """Return "node 1 (host)"."""
        return f"node {node} ({self.hosts[self.leaders[node]]})"


class Check(NamedTuple):
    """A check: its name, what every rank does (collective), and what rank 0 makes of it."""

    name: str
    probe: "Callable[[Machine], Facts]"
    judge: Callable[[Sequence[Facts], Job], Finding]


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict."""
    verdicts = {finding.verdict for finding in findings}
    order: tuple[Verdict, ...] = ("problem", "note")
    return next((verdict for verdict in order if verdict in verdicts), "ok")


def ranks_of(told: Sequence[Facts], key: str) -> dict[Any, list[int]]:
    """Return which ranks told which value of `key`, the most frequent value first."""
    groups: dict[Any, list[int]] = {}
    for rank, facts in enumerate(told):
        groups.setdefault(facts[key], []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def listed(numbers: Iterable[int]) -> str:
    """Return "0-3, 6" of a set of numbers."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def who(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2"."""
    ranks = list(ranks)
    return f"rank{'s' * (len(ranks) != 1)} {listed(ranks)}"


def median(values: Iterable[float]) -> float:
    """Return the median, or 0 of nothing."""
    values = list(values)
    return statistics.median(values) if values else 0.0


def size(nbytes: float) -> str:
    """Return bytes as "12.5 GiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
