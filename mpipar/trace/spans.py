"""Spans of time that every layer may emit, and the Timeline that collects them.

`simulate` fills a Timeline with predicted spans, a running job with measured ones; `draw` shows
both in the same picture.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one rank.  Times are seconds from the timeline's origin."""

    rank: int
    name: str
    kind: str  # "send", "recv", "reduce", "wait", "compute", ...
    start: float
    stop: float
    peer: int | None = None
    bytes: int = 0


@dataclass
class Timeline:
    """Spans of many ranks on one clock."""

    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Append one span."""
        self.spans.append(span)

    def extend(self, spans: Iterable[Span]) -> None:
        """Append several spans."""
        self.spans.extend(spans)

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last span."""
        return max((span.stop for span in self.spans), default=0.0)

    def of(self, rank: int) -> list[Span]:
        """Return the spans of one rank, by start time."""
        return sorted((s for s in self.spans if s.rank == rank), key=lambda s: (s.start, s.stop))

    def ranks(self) -> list[int]:
        """Return the ranks that have spans."""
        return sorted({span.rank for span in self.spans})

    def busy(self, rank: int, kind: str | None = None) -> float:
        """Return the seconds of a rank's spans (of one kind, if given)."""
        mine = (span for span in self.spans if span.rank == rank)
        return sum(span.stop - span.start for span in mine if kind in (None, span.kind))
