"""Lets `mpiexec -n 4 pytest` run the whole suite: a pytest plugin for several MPI ranks.

    rank 0   unit 0  unit 2      |  mpi a  agree  mpi b  agree  ...  |  summary of all ranks
    rank 1   unit 1    launch 2  |  mpi a  agree  mpi b  agree  ...  |  (quiet)
    rank 2   launch 0  unit 3    |  mpi a  agree  mpi b  agree  ...  |  (quiet)
    rank 3   launch 1            |  mpi a  agree  mpi b  agree  ...  |  (quiet)

- A test with the mark `mpi` runs on every rank at once. Afterwards the ranks trade their outcomes:
  if it failed on any, it failed on all, and the report shows the error of each failing rank.
- Every other test runs on one rank only, the next that is free. The last two ranks begin with those
  that start an `mpiexec` themselves; of the others all but rank 0 help them at the end, so that not
  too many jobs run at a time. Rank 0 reports them all; every rank's exit code knows of failures.
- Each test has a time limit (60 s; `@pytest.mark.time_limit(seconds)`). When a rank has failed, the
  others get a short grace to finish the same test. Past either, the job ends with all stacks shown.
"""

import gc
import hashlib
import os
import signal
from collections.abc import Generator, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl
from _pytest.config import create_terminal_writer
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from tests import launch
from tests.ranks import reports
from tests.ranks.exchange import Exchange
from tests.ranks.queue import Queue
from tests.ranks.watchdog import Watchdog

LIMIT = 60.0  # seconds for a test
LAUNCH_LIMIT = 300.0  # for one that starts its own mpiexec
LAUNCHERS = 2  # ranks that begin with those
FINALIZE_LIMIT = 60  # seconds for MPI_Finalize at the end of the process

failed_here = pytest.StashKey[bool]()  # set on an item when it failed on this rank


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ranks", "several MPI ranks")
    group.addoption(
        "--synchronous-sends",
        action="store_true",
        help="make every send of a schedule synchronous, so that none relies on buffering",
    )
    group.addoption(
        "--grace",
        type=float,
        default=20.0,
        help="seconds that ranks have to finish a test which failed on another rank (default 20)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, start watching, and give each rank a place of its own for `tmp_path`."""
    for line in (
        "mpi: runs on all ranks at once",
        "launch: starts its own mpiexec, so it runs on one of the last ranks",
        "time_limit(seconds): how long the test may take before the job is ended (default 60)",
    ):
        config.addinivalue_line("markers", line)
    if config.getoption("--synchronous-sends"):
        os.environ["MPIPAR_SYNCHRONOUS_SENDS"] = "1"  # read when mpipar.comm.run is imported
    ranks = Ranks(config)
    config.pluginmanager.register(ranks, "mpipar-ranks")
    # pytest's own place is shared, and a process that tidies it there can trip over another
    given = config.getoption("basetemp")
    parent = Path(given) if given else ranks.watchdog.folder
    parent.mkdir(parents=True, exist_ok=True)
    config.option.basetemp = parent / f"rank-{ranks.rank}"


class Ranks:
    """The state of one pytest process among the ranks, and the hooks that use it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.exchange = Exchange(self.world)
        self.watchdog = Watchdog(self.world, self._earlier_failures)
        self.failed: list[str] = []  # lines on what failed so far
        self.unsent: list[dict[str, Any]] = []  # reports for rank 0 of tests that ran here alone
        self.collective = False  # whether the running test runs on all ranks
        self.met = False  # whether the ranks have met after the tests that run on one of them
        self.finished = False
        self.threads = threadpoolctl.threadpool_limits(1, "blas") if self.size > 1 else None

    # ---- start and end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Let rank 0 print at once, and the other ranks not at all."""
        terminal: Any = self.config.pluginmanager.getplugin("terminalreporter")
        if terminal is None:
            return
        if self.rank > 0:
            null = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
            terminal._tw = create_terminal_writer(self.config, null)
        elif hasattr(terminal._tw._file, "reconfigure"):
            terminal._tw._file.reconfigure(line_buffering=True, write_through=True)

    def pytest_report_header(self) -> str:
        """Say on how many ranks of which library this runs."""
        return f"MPI: {self.size} ranks, {MPI.Get_library_version().splitlines()[0]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run this rank's tests; bring the outcomes of all together, however it ends."""
        try:
            if session.testsfailed and not session.config.option.continue_on_collection_errors:
                raise session.Interrupted(f"{session.testsfailed} errors during collection")
            if not session.config.option.collectonly:
                self._run(session)
            return True
        finally:
            self.watchdog.disarm()
            self._finish(session)

    def _run(self, session: pytest.Session) -> None:
        gc.freeze()  # what the suite itself holds: looking through it takes gc.collect() 0.3 s
        for item, following in pairwise(chain(self._own(session.items), [None])):
            assert item is not None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the others if this rank never came to its loop."""
        if not self.finished:
            self._finish(session, wait=False)

    def pytest_unconfigure(self) -> None:
        """Stop watching; MPI_Finalize, which comes last of all, gets a time limit too."""
        self.watchdog.close()
        if self.size > 1:
            signal.alarm(FINALIZE_LIMIT)

    # ---- which tests run here

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Make sure that all ranks know the same tests."""
        digest = hashlib.sha256("\n".join(item.nodeid for item in items).encode()).hexdigest()
        if len(set(self.exchange.trade(digest).values())) > 1:
            raise pytest.UsageError("the ranks collected different tests")

    def _own(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Yield what this rank takes of the tests for one process, then all of the MPI tests."""
        if self.size == 1:
            yield from items
            return
        alone = [item for item in items if not is_collective(item)]
        folder = self.watchdog.folder
        launching = Queue(folder / "launching", [item for item in alone if is_launching(item)])
        others = Queue(folder / "others", [item for item in alone if not is_launching(item)])
        if self.rank >= self.size - LAUNCHERS:
            yield from chain(launching, others)
        else:
            yield from chain(others, launching if self.rank else [])
        yield from (item for item in items if is_collective(item))

    # ---- running one

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run one test, on this rank alone or together with the others."""
        self.collective = is_collective(item)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self.collective:
            if not self.met:
                self._meet(item.session)
                if item.session.shouldstop:  # a rank is not there: do not begin without it
                    raise item.session.Interrupted(item.session.shouldstop)
            self._run_together(item, nextitem)
        else:
            with launch.clean_environment_of(os.environ):
                self.watchdog.arm(item.nodeid, limit_of(item))
                runtestprotocol(item, log=True, nextitem=nextitem)
                self.watchdog.disarm()
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_together(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self.watchdog.arm(item.nodeid, limit_of(item))
        own = runtestprotocol(item, log=False, nextitem=nextitem)
        messages = self._trade(item.session, item.nodeid, reports.failures(self.rank, own))
        self.watchdog.disarm()
        reports.agree(own, [failure for failed in messages for failure in failed])
        for report in own:
            item.ihook.pytest_runtest_logreport(report=report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """After a failure give the other ranks only a short time: they may wait for this one."""
        report = yield
        if report.failed:
            item.stash[failed_here] = True
            if self.collective and self.size > 1:
                self.watchdog.hasten(self.config.getoption("--grace"), report.longreprtext)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what failed, and what rank 0 has to print of the tests that run here alone."""
        if report.failed:
            self.failed.append(f"{report.nodeid}: {reports.message(report)}")
        if self.rank > 0 and not self.collective:
            data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            self.unsent.append(data)

    # ---- bringing the ranks together

    def _meet(self, session: pytest.Session) -> None:
        """Wait, without a limit of its own, until all ranks are through with their own tests."""
        self.met = True
        gc.collect()
        gc.freeze()
        unsent, self.unsent = self.unsent, []
        for sent in self._trade(session, "the tests on all ranks", unsent):
            self._print(sent)

    def _trade(self, session: pytest.Session, where: str, message: Any) -> list[Any]:
        got = self.exchange.trade((where, message))
        places = {rank: place for rank, (place, _) in got.items()}
        if len(set(places.values())) > 1:
            self.watchdog.abort(where, f"is not what all ranks run: {places}")
        if self.exchange.last and not session.shouldstop:
            session.shouldstop = f"rank {min(self.exchange.last)} stopped early"
        return [body for _, (_, body) in sorted(got.items())]

    def _finish(self, session: pytest.Session, wait: bool = True) -> None:
        self.finished = True
        last = self.exchange.finish((bool(session.testsfailed), self.unsent), wait)
        for rank, (failed, sent) in sorted(last.items()):
            if rank != self.rank and failed and self.rank > 0:
                session.testsfailed += 1
            self._print(sent)

    def _print(self, sent: list[dict[str, Any]]) -> None:
        """Let rank 0 report tests that ran on another rank as if they had run here."""
        if self.rank > 0:
            return
        hook = self.config.hook
        for data in sent:
            report = hook.pytest_report_from_serializable(config=self.config, data=data)
            place = {"nodeid": report.nodeid, "location": report.location}
            if report.when == "setup":
                hook.pytest_runtest_logstart(**place)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(**place)

    def _earlier_failures(self) -> str:
        return "".join(f"failed before: {line}\n" for line in dict.fromkeys(self.failed))


def is_collective(item: pytest.Item) -> bool:
    """Whether the test runs on all ranks at once."""
    return item.get_closest_marker("mpi") is not None


def is_launching(item: pytest.Item) -> bool:
    """Whether the test starts its own mpiexec: it has the mark, or its module imports `launch`."""
    if item.get_closest_marker("launch") is not None:
        return True
    names = vars(getattr(item, "module", object)).values()
    return any(value is launch.launch for value in names)  # `in` would compare arrays


def limit_of(item: pytest.Item) -> float:
    """Return the seconds that the test may take."""
    mark = item.get_closest_marker("time_limit")
    if mark is not None:
        return float(mark.args[0])
    return LAUNCH_LIMIT if is_launching(item) else LIMIT
