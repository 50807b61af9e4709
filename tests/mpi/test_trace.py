"""Traces of real runs on all ranks: what is recorded is what happened, on one clock."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpipar as mp
import mpipar.parallel.trace
from mpipar.cli import pipelines
from mpipar.comm import clock
from mpipar.errors import ConfigError, StateError
from mpipar.schedule.pipeline import make
from mpipar.trace import chrome, record
from mpipar.trace.parts import Event
from mpipar.trace.pieces import in_steps, pieces
from mpipar.trace.summary import summarise
from mpipar.train.agree import is_of_all_ranks
from mpipar.train.config import TrainConfig
from mpipar.train.loop import train
from mpipar.train.report import Report

TINY = TrainConfig(
    layers=4, dim=24, heads=12, hidden=48, seq=8, batch=12, steps=4, sample=0, eval_every=0,
    eval_batches=1,
)  # fmt: skip


def talk(comm: mp.Communicator, window: Any = None) -> None:
    """Use each way in which a communicator takes time."""
    for _ in range(3):  # the second and third go the short way
        comm.all_reduce(np.ones(3))
    handles = [comm.all_reduce(np.ones(30_000), async_op=True) for _ in range(3)]
    comm.all_gather(np.ones(5))
    for handle in handles:
        handle.wait()
    if window is not None:
        window.start().wait()
    if comm.size > 1:
        comm.sendrecv(np.ones(7))
    comm.barrier()


def counters(mesh: mp.Mesh) -> tuple[float, dict[str, tuple[float, Counter[str]]]]:
    """Return what this thread, and each communicator, has spent so far."""
    groups = {comm.name: comm.process_group for comm in (mesh.tp, mesh.world)}
    return clock.seconds(), {name: (g.seconds, Counter(g.calls)) for name, g in groups.items()}


def loop(folder: Path, mesh: mp.Mesh, steps: tuple[int, int] | None = None) -> tuple[Path, Any]:
    """Take three steps; return the trace's path, and the counters before and after."""
    how = steps, f"tp {mesh.tp.rank}"
    with mesh.tp.window(1000) as window, mp.Trace(folder, mesh.world, *how) as trace:
        before = counters(mesh)
        for number in range(1, 4):
            with trace.step(number):
                with trace.phase("forward"):
                    talk(mesh.tp, window)
                with trace.phase("backward"):
                    talk(mesh.world)
        after = counters(mesh)
    return trace.path, (before, after)


def mesh_of(world: MPI.Intracomm) -> mp.Mesh:
    return mp.Mesh(world, tp=2 - world.size % 2)


def test_what_is_recorded_is_what_the_communicators_counted(
    world: MPI.Intracomm, shared_path: Path
) -> None:
    with mesh_of(world) as mesh:
        talk(mesh.tp)
        path, ((start, before), (stop, after)) = loop(shared_path / "trace", mesh)
    assert [found.name for found in path.parent.iterdir()] == ["trace.json"]
    events = [e for e in chrome.events(path) if e.rank == world.rank]
    for name, (seconds, counted) in after.items():
        own = [e for e in events if e.communicator == name]
        calls = [e for e in own if e.kind == "call"]
        told = sum(e.stop - e.start for e in calls)
        assert told == pytest.approx(seconds - before[name][0], abs=1e-8 * len(calls))
        collectives = {e.sequence: e.name.partition("/")[0] for e in own if e.sequence}
        assert Counter(collectives.values()) == counted - before[name][1]
        flying = Counter(e.bytes for e in own if e.kind == "flight")
        assert flying[240_000] == 9
    _spans_lie_within_each_other(events, stop - start)


def _spans_lie_within_each_other(events: list[Event], inside: float) -> None:
    steps = [e for e in events if e.kind == "step"]
    assert [step.name for step in steps] == ["step 1", "step 2", "step 3"]
    for kind in ("phase", "call"):
        mine = [e for e in events if e.kind == kind]
        placed = list(in_steps(events, kind))
        assert len(placed) == len(mine) - sum(e.name == "write trace" for e in mine)
        ends = {step.name: step.stop for step in steps}
        assert all(e.stop <= ends[step] + 1e-8 for e, step in placed)
    cut = list(pieces(events))
    assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(cut))
    communication = sum(piece.seconds for piece in cut if piece.is_communication)
    assert communication == pytest.approx(inside, rel=0.05, abs=1e-3)
    whole = sum(piece.seconds for piece in cut if piece.step is not None)
    assert whole == pytest.approx(sum(step.stop - step.start for step in steps), abs=1e-6)


def test_the_file_is_what_browsers_read(world: MPI.Intracomm, shared_path: Path) -> None:
    with mesh_of(world) as mesh:
        path, _ = loop(shared_path / "trace", mesh, steps=(2, 3))
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == list(range(world.size))
    assert names[0].startswith("rank 0 (tp 0) on ")
    last: dict[Any, list[float]] = defaultdict(list)  # where the open spans of a track end
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in complete if e["cat"] == "step"} == {"step 2", "step 3"}
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        track = event["pid"], event["tid"]
        assert track in tracks
        ends = last[track]
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 2e-3, "spans of a track nest"
        ends.append(end)
    assert {e["ph"] for e in events} == {"M", "X"}


def test_clocks_of_other_nodes_are_put_right(
    world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIPAR_FAKE_NODES", "0,1,2,3")
    ahead = 7.0 * world.rank
    real = clock.time.perf_counter
    shifted = SimpleNamespace(perf_counter=lambda: real() + ahead, time=clock.time.time)
    for module in (clock, record, mpipar.parallel.trace):
        monkeypatch.setattr(module, "time", shifted)
    with mp.Communicator(world) as comm:
        with mp.Trace(shared_path / "trace", comm) as trace, trace.step(1):
            for _ in range(5):
                comm.barrier()
        barriers: dict[int, list[Event]] = defaultdict(list)
        for event in chrome.events(trace.path):
            if event.kind == "call":
                barriers[event.sequence].append(event)
    assert len(barriers) >= 5
    for calls in barriers.values():  # nobody leaves a barrier before all have come
        assert len(calls) == world.size
        assert min(e.stop for e in calls) >= max(e.start for e in calls) - 5e-3
    assert max(e.stop for calls in barriers.values() for e in calls) < 60.0


def test_nothing_is_told_where_nothing_is_traced(
    world: MPI.Intracomm, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("call", "wait", "flying", "span", "action", "pipeline"):
        monkeypatch.setattr(record.Recorder, name, lambda *_, name=name: told.append(name))
    with mesh_of(world) as mesh:
        talk(mesh.world)
        with record.phase("forward"):
            talk(mesh.tp)
    assert record.to is None
    assert not told


class Told(Report):
    summary = ""

    def traced(self, path: str, summary: str) -> None:
        self.summary = summary


def test_a_pipeline_is_drawn_as_it_ran(
    world: MPI.Intracomm, shared_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pp, folder = (world.size if world.size < 4 else 2), shared_path / "trace"
    told = Told()
    config = replace(TINY, data=text, pp=pp, trace=str(folder), trace_steps="2:4")
    train(config, world, told if world.rank == 0 else None)
    if world.rank != 0:
        return
    found = summarise(folder / "trace.json")
    assert told.summary == found.text()
    assert list(found.steps) == ["3", "4"]
    for times in found.ranks:
        assert times.compute + sum(times.exposed.values()) == pytest.approx(times.step)
        assert (times.idle is None) == (pp == 1)
        assert times.idle is None or 0 <= times.idle < 1
    if pp == 1:
        with pytest.raises(ConfigError, match="no pipeline ran"):
            pipelines.compare("", folder, None, 96, None)
        return
    svg = folder / "step.svg"
    assert pipelines.compare("", folder, 3, 96, svg) == 0
    schedule = make("1f1b", pp, config.through_pipeline(world.size // pp))
    hints = re.findall(r"<title>rank (\d) (?:forward|backward) (\w+):", svg.read_text())
    rows = [(str(rank), str(a)) for rank, row in enumerate(schedule.actions) for a in row]
    assert Counter(hints) == Counter(2 * rows)
    capsys.readouterr()
    pipelines.compare("", folder, None, 96, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"1f1b on {pp} ranks, ")
    assert "step 4 of " in lines[0]
    assert sum(line.startswith("rank ") for line in lines) == 2 * pp
    with pytest.raises(ConfigError, match="steps 2, 3, 4"):
        pipelines.compare("", folder, 9, 96, None)


def test_mistakes_are_told_on_every_rank_before_anything_runs(
    world: MPI.Intracomm, shared_path: Path, text: str
) -> None:
    config = replace(TINY, data=text)
    for changes, words in [
        ({"trace": text}, "it is a file"),
        ({"trace": f"{text}/below"}, "nothing can be written there"),
        ({"trace_steps": "1:2"}, "--trace with a folder"),
        ({"trace": str(shared_path), "trace_steps": "3:1"}, "first and the last step"),
        ({"trace": str(shared_path), "trace_steps": "1-2"}, "first and the last step"),
        ({"trace": str(shared_path), "elastic": True}, "outlives"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            train(replace(config, **changes), world)
        assert is_of_all_ranks(caught.value) or "trace" not in changes or len(changes) == 2
    with mp.Communicator(world) as comm:
        trace = mp.Trace(shared_path / "outer", comm)
        with trace, pytest.raises(StateError, match="another trace"):
            mp.Trace(shared_path / "inner", comm)
        assert trace.path.exists()
        trace.close()
