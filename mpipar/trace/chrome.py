"""One file of all ranks in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing
show: a process for each rank, and in it a track (thread) for each of

    steps                  steps and their phases
    compute                what the program did while it was in no communication call
    pipeline               actions of the pipeline
    dp                     calls of a communicator that the program was inside of, and waits in them
    dp, in flight          what was on its way meanwhile, in as many tracks as overlap

The file has a line for each event, so that it is written, and read again, one event at a time.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mpipar.errors import ConfigError, explain
from mpipar.trace.parts import PATTERN, Event, Part, parts
from mpipar.trace.pieces import pieces

NAME = "trace.json"
HEAD_END, TAIL = ',"traceEvents":[', "]}"
CATEGORIES = {"call": "communication", "wait": "wait", "flight": "in flight"}
KINDS = {category: kind for kind, category in CATEGORIES.items()}
_encode = json.JSONEncoder(separators=(",", ":")).encode
COMPUTE = "compute"  # the category of what is derived: events() leaves it out


def merge(directory: Path) -> Path:
    """Write the parts in a folder as one file there, and return its path.

    Raises ConfigError if there are none or the file cannot be written.
    """
    found = parts(directory)
    if not found:
        rule = "there is no trace in this folder"
        raise ConfigError(explain("trace", str(directory), rule, "Name the folder of --trace"))
    target = directory / NAME
    unfinished = target.with_suffix(".unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            _write(found, file)
        os.replace(unfinished, target)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        rule = f"it cannot be written ({error.strerror})"
        fix = f"Make room, then run mpipar trace {directory}"
        raise ConfigError(explain("trace", str(target), rule, fix)) from error
    return target


def find(path: Path) -> Path:
    """Return the file of a trace that is named by it or by its folder; merge parts, if any."""
    if not path.is_dir():
        return path
    if any(path.glob(PATTERN)) or not (path / NAME).exists():
        return merge(path)
    return path / NAME


def head(path: Path) -> dict[str, Any]:
    """Return what the file says of the run; raises ConfigError for a file of something else."""
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline().rstrip()
        told = json.loads(line.removesuffix(HEAD_END) + "}")["mpipar"]
        assert line.endswith(HEAD_END)
    except OSError as error:
        rule = f"it cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AssertionError):
        rule = "it is no trace that mpipar has written"
    else:
        return dict(told)
    raise ConfigError(explain("trace", str(path), rule, "Name the folder of --trace"))


def events(path: Path) -> Iterator[Event]:
    """Yield the events of the file, rank by rank."""
    with path.open(encoding="utf-8") as file:
        next(file)
        for line in file:
            if line.rstrip() == TAIL:
                return
            try:
                event = _event(json.loads(line.rstrip().removesuffix(",")))
            except (ValueError, LookupError, TypeError, AttributeError):
                rule, fix = "it is damaged: it breaks off in an event", "Trace the run again"
                raise ConfigError(explain("trace", str(path), rule, fix)) from None
            if event is not None:
                yield event


def _event(found: dict[str, Any]) -> Event | None:
    """Return the event of a line; None for one of computing."""
    category = found.get("cat", COMPUTE)
    if category == COMPUTE:
        return None
    told, start = found["args"], found["ts"] * 1e-6
    return Event(
        found["pid"],
        KINDS.get(category, category),
        found["name"],
        start,
        start + found["dur"] * 1e-6,
        told.get("communicator", ""),
        told.get("group", ""),
        told.get("sequence", 0),
        told.get("bytes", 0),
        told.get("call", ""),
    )


def _write(found: list[Part], file: TextIO) -> None:
    schedules = {group: told for part in found for group, told in part.pipelines().items()}
    told = {
        "ranks": len(found),
        "started": found[0].header["started"],
        "incomplete": [part.rank for part in found if not part.complete],
        "lost": {part.rank: part.lost for part in found if part.lost},
        "pipelines": {group: {"name": n, "csv": csv} for group, (n, csv) in schedules.items()},
    }
    line = json.dumps({"displayTimeUnit": "ms", "mpipar": told})
    file.write(line.removesuffix("}") + HEAD_END)
    between = "\n"
    for part in found:
        for event in _of_rank(part):
            file.write(between + _encode(event))
            between = ",\n"
    file.write(f"\n{TAIL}\n")


def _of_rank(part: Part) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank, tracks and their names first."""
    rank, all_events = part.rank, sorted(part.events(), key=lambda e: (e.start, -e.stop))
    title = f"rank {rank}" + (f" ({part.header['place']})" if part.header.get("place") else "")
    yield _named("process_name", rank, 0, {"name": f"{title} on {part.header['host']}"})
    yield _named("process_sort_index", rank, 0, {"sort_index": rank})
    for number, (name, track) in enumerate(_tracks(all_events).items(), 1):
        yield _named("thread_name", rank, number, {"name": name})
        yield _named("thread_sort_index", rank, number, {"sort_index": number})
        yield from (_complete(event, number) for event in track)


def _tracks(events: list[Event]) -> dict[str, list[Event]]:
    """Return the events by track, tracks in the order in which they are shown."""
    found = {
        "steps": [e for e in events if e.kind in ("step", "phase")],
        "compute": [
            Event(p.inner.rank, COMPUTE, _work(p.inner), p.start, p.stop)
            for p in pieces(events)
            if not p.is_communication
        ],
        "pipeline": [e for e in events if e.kind == "action"],
    }
    groups = sorted({e.group: e.communicator for e in events if e.group}.items())
    for group, _ in groups:
        shown = group.rpartition(",")[0]  # without the ranks
        found[shown] = [e for e in events if e.group == group and e.kind in ("call", "wait")]
        flying = [e for e in events if e.group == group and e.kind == "flight"]
        for number, lane in enumerate(_lanes(flying), 1):
            found[f"{shown}, in flight" + (f" {number}" if number > 1 else "")] = lane
    return {name: track for name, track in found.items() if track}


def _work(event: Event) -> str:
    """Return how the compute track calls the time in a span; what of a step is in no phase."""
    return "other" if event.kind == "step" else event.name


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events, which are sorted, in as few rows as they overlap."""
    rows: list[list[Event]] = []
    for event in events:
        free = next((row for row in rows if row[-1].stop <= event.start), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def _named(name: str, rank: int, track: int, told: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "args": told}


def _complete(event: Event, track: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if event.group:
        told |= {"communicator": event.communicator, "group": event.group}
    if event.sequence:
        told["sequence"] = event.sequence
    if event.details:
        told |= {"bytes": event.bytes, "call": event.details}
    start = round(event.start * 1e6, 3)
    return {
        "ph": "X",
        "cat": CATEGORIES.get(event.kind, event.kind),
        "name": event.name,
        "ts": start,
        "dur": max(0.0, round(event.stop * 1e6 - start, 3)),
        "pid": event.rank,
        "tid": track,
        "args": told,
    }
