"""Reads the reports that the ranks of a stuck job have written, and shows them side by side.

    rank  process  host   communicator  call                     where it stands
    0     4711     node1  world         #7 all_reduce(float32..  round 1 of 2, waits for rank 1
    1     4712     node1  tp            #3 barrier               round 0 of 1, waits for rank 0

`diagnosis.py` says what that means.  The format is that of comm/report.py.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpipar.errors import ConfigError, explain

SHOWN = 64  # ranks in the table
Key = tuple[str, tuple[int, ...], int]  # name, world ranks of the members, which of those alike


class Call(NamedTuple):
    """A collective (with a number above 0) or message, and where it stood."""

    sequence: int
    what: str
    place: str

    @property
    def text(self) -> str:
        """The call as one writes it."""
        return f"#{self.sequence} {self.what}" if self.sequence else self.what

    @property
    def short(self) -> str:
        """The call without its arguments."""
        return self.text.partition("(")[0]


@dataclass(frozen=True)
class Standing:
    """What one rank says of one communicator; `waits_for` and `heard` have world ranks."""

    calls: tuple[Call, ...]
    waiting: bool
    waits_for: tuple[int, ...] = ()
    heard: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def last(self) -> Call | None:
        """The newest call."""
        return self.calls[-1] if self.calls else None


@dataclass(frozen=True)
class Report:
    """What one rank has written."""

    rank: int
    host: str
    pid: int
    why: str
    standings: dict[Key, Standing]
    job: str
    size: int
    time: float  # when it was written, in seconds
    processes: tuple[tuple[str, int], ...]  # host and process id of every rank


@dataclass(frozen=True)
class Reports:
    """The reports of a job of `size` ranks; `processes` may name ranks without a report."""

    job: str
    size: int
    of: dict[int, Report]
    processes: dict[int, tuple[str, int]]  # rank -> host, process id

    def who(self, rank: int) -> str:
        """Return "rank 1 (process 4712 on node1)"."""
        if rank not in self.processes:
            return f"rank {rank}"
        host, pid = self.processes[rank]
        return f"rank {rank} (process {pid} on {host})"

    def communicators(self) -> dict[Key, dict[int, Standing]]:
        """Return what each rank says of each communicator."""
        found: dict[Key, dict[int, Standing]] = {}
        for rank in sorted(self.of):
            for key, standing in self.of[rank].standings.items():
                found.setdefault(key, {})[rank] = standing
        return found


def read(folder: Path) -> Reports:
    """Read the reports in a folder: those of the newest job, if there are several.

    Raises ConfigError if there are none, or if one cannot be read.
    """
    told = []
    for path in sorted(folder.glob("rank[0-9]*.json")):
        try:
            told.append(_report(json.loads(path.read_text())))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            rule = f"the report cannot be read ({type(error).__name__}: {error})"
            raise ConfigError(explain("report", str(path), rule, "Remove it")) from None
    if not told:
        rule = "there are no reports (rank0.json and so on) in it"
        fix = "Name the folder that the job has named, mpipar-report-... or MPIPAR_REPORT_DIR"
        raise ConfigError(explain("report", str(folder), rule, fix))
    newest = max(told, key=lambda one: one.time)
    job = [one for one in told if (one.job, one.size) == (newest.job, newest.size)]
    processes = dict(enumerate(newest.processes))
    processes |= {one.rank: (one.host, one.pid) for one in job}
    return Reports(newest.job, newest.size, {one.rank: one for one in job}, processes)


def _report(told: dict[str, Any]) -> Report:
    """Return what a file says; what is not as `comm.report` writes it is an error of Python's."""
    standings: dict[Key, Standing] = {}
    for comm in told["communicators"]:
        name, ranks, alike = str(comm["name"]), tuple(map(int, comm["ranks"])), 0
        while (name, ranks, alike) in standings:
            alike += 1
        standings[name, ranks, alike] = Standing(
            tuple(_call(call) for call in comm["calls"]),
            bool(comm["waiting"]),
            tuple(map(int, comm["waits_for"])),
            {int(rank): _heard(heard) for rank, heard in comm["heard"].items()},
        )
    size = int(told["size"])
    if not 0 <= int(told["rank"]) < size:
        raise ValueError(f"rank {told['rank']} of {size}")
    return Report(
        int(told["rank"]),
        _text(told["host"]),
        int(told["pid"]),
        _text(told["why"]),
        standings,
        _text(told["job"]),
        size,
        float(told["time"]),
        tuple((_text(one["host"]), int(one["pid"])) for one in told["ranks"]),
    )


def _call(told: dict[str, Any]) -> Call:
    return Call(int(told["sequence"]), _text(told["what"]), _text(told["place"]))


def _heard(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "sequence": int(told["sequence"]), "what": _text(told["what"])}


def _text(value: Any) -> str:
    """Return what can be printed of a value."""
    return str(value).encode("utf-8", "replace").decode()


def tell(folder: Path, json_file: Path | None = None) -> int:
    """Print the reports in a folder and what they mean; return the exit code."""
    from mpipar.doctor import diagnosis, show
    from mpipar.doctor.finding import worst

    reports = read(folder)
    _table(reports)
    findings = diagnosis.diagnose(reports)
    show.table(findings)
    if json_file is not None:
        json_file.write_text(show.as_json(findings, {}) + "\n")
    return int(worst(findings) == "problem")


def _table(reports: Reports) -> None:
    from rich.console import Console
    from rich.table import Table

    from mpipar.train import terminal

    title = f"job {reports.job}, {reports.size} ranks"
    shown = Table(title=title, pad_edge=False, title_justify="left")
    for name in ("rank", "process", "host", "communicator", "call", "where it stands"):
        shown.add_column(name, overflow="fold")
    for row in rows(reports):
        shown.add_row(*row)
    columns = terminal.width()
    console = Console(force_terminal=columns is not None, width=columns or 130, highlight=False)
    console.print(shown, markup=False)


def rows(reports: Reports) -> Iterable[Sequence[str]]:
    """Yield the cells of each rank: of the calls it waits in, or else of its last ones."""
    for rank in range(min(reports.size, SHOWN)):
        host, pid = reports.processes.get(rank, ("?", "?"))
        first = (str(rank), str(pid), host)
        report = reports.of.get(rank)
        if report is None:
            yield (*first, "", "", "no report")
            continue
        known = [(key[0], s) for key, s in report.standings.items() if s.last is not None]
        waiting = [(name, standing) for name, standing in known if standing.waiting]
        if not known:
            yield (*first, "", "", "no call yet")
        for name, standing in waiting or known:
            call = standing.last
            assert call is not None
            yield (*first, name, call.text, _place(call, standing))
            first = ("", "", "")


def _place(call: Call, standing: Standing) -> str:
    if not standing.waiting:
        return "not waiting"
    from mpipar.doctor.finding import who

    round_, _, _ = call.place.partition(",")
    peers = f", waits for {who(standing.waits_for)}" if standing.waits_for else ""
    return round_ + peers
