"""The flight recorder and the watchdog of one communicator.

The recorder keeps the last 64 collectives of this rank.  A wait that takes longer than a second
asks the watchdog, which tells every other rank of the group what this one is doing and reads what
they told.  From that it finds, within seconds and without a deadlock:

    two ranks under one sequence number in different collectives, shapes, dtypes or operations
    a ring of blocking sends
    a rank whose program has ended while others wait for it (it says goodbye at exit)
    a rank that destroys the communicator while others still use it, or in another order than they

and, after the communicator's time limit, it gives up and says who waits for whom.  Whatever it
finds, all ranks that wait write a report (report.py).
"""

import atexit
import json
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from mpipar.comm import report
from mpipar.comm.node import world_ranks
from mpipar.errors import CollectiveTimeoutError, MismatchError, MpiparError

KEEP = 64
SHOWN = 8  # of them on stderr when something goes wrong
TAG = 0  # of the watchdogs' messages
DESTROY = "destroy()"  # what a rank waits in that is about to free the communicator
EVERYONE = 64  # groups up to this size tell all; larger ones tell the neighbours in the ring


class Record:
    """One collective or message of this rank.

    sequence: its number; 0 for send and recv, which are not collective.  sends_to: the peer of a
    blocking send.  handle: Execution or Requests, which says where it stands; a finished one, with
    the arrays of its result, is not kept alive.
    """

    __slots__ = ("_handle", "sends_to", "sequence", "what")

    def __init__(self, sequence: int, what: str, handle: Any = None, sends_to: int = -1) -> None:
        self.sequence, self.what, self.sends_to = sequence, what, sends_to
        self.handle = handle

    @property
    def handle(self) -> Any:
        """The handle, while it lives."""
        return None if self._handle is None else self._handle()

    @handle.setter
    def handle(self, handle: Any) -> None:
        self._handle = None if handle is None else weakref.ref(handle)

    @property
    def place(self) -> str:
        """Where it stands: the round and the peers, if that is known."""
        gone = "started" if self._handle is None else "done"
        return str(getattr(self.handle, "place", gone))

    def text(self) -> str:
        """Return one line: number, call, and where it stands."""
        number = f"#{self.sequence} " if self.sequence else ""
        return f"{number}{self.what} ({self.place})"


class Flight:
    """Recorder and watchdog; `look` is what a long wait calls."""

    def __init__(self, comm: MPI.Comm, name: str, timeout: float) -> None:
        self._comm, self._name, self._timeout = comm, name, timeout
        self.records: deque[Record] = deque(maxlen=KEEP)
        self.number = next(_numbers)
        self.running: Any = None
        self._next_telling = self._next_writing = 0.0
        self._heard: dict[int, dict] = {}
        self._sends: list[MPI.Request] = []
        _live.add(self)

    def note(self, record: Record) -> Record:
        """Remember a collective."""
        self.records.append(record)
        return record

    def members(self) -> tuple[str, tuple[int, ...]]:
        """Return the communicator's name, and its ranks as they are numbered in the world."""
        return self._name, world_ranks(self._comm)

    def __str__(self) -> str:
        last = self.records[-1].what if self.records else "no collective yet"
        return f"communicator {self._name!r}, {last}"

    def look(self, waited: float) -> None:
        """Find out why a wait takes long.

        Raises MismatchError when the ranks do not agree, CollectiveTimeoutError after the limit.
        """
        if not self.records:
            return
        record = self.records[-1]
        if record.handle is None:
            record.handle = self.running
        self._tell(record, waited)
        for flight in tuple(_live):
            flight._hear()
        try:
            self._find(record, waited)
        except MpiparError as error:
            self._report(str(error))
            raise
        if _asked:
            _pass_on()
        elif waited > report.LONG_WAIT and time.time() > self._next_writing:
            self._next_writing = time.time() + waited / 2
            report.write(f"has waited for {waited:.0f} s", _live, failed=False)

    def _find(self, record: Record, waited: float) -> None:
        self._find_destroyed(record)
        self._compare()
        self._find_left(record)
        self._find_ring(record)
        self._find_crossed(record)
        if waited > self._timeout:
            raise CollectiveTimeoutError(
                f"rank {self._comm.rank} of communicator {self._name!r} waited {waited:.1f} s "
                f"(timeout={self._timeout:g} s) in {record.text()}. {self._others(record)}"
            )

    def _report(self, why: str) -> None:
        """Write down what all ranks that listen are doing, and say where."""
        path = report.write(why, _live, failed=True)
        _ask_everyone()
        shown = tuple(self.records)[-SHOWN:]
        rank, name = MPI.COMM_WORLD.rank, self._name
        lines = [f"rank {rank}, communicator {name!r}: the last {len(shown)} calls"]
        lines += ["  " + record.text() for record in shown]
        if path is not None:
            lines.append(f"all ranks side by side: mpipar doctor --report {path.parent}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        report.wait_for_others()

    def as_json(self) -> dict[str, Any]:
        """Return what this rank knows of the communicator; ranks are numbered as in the world."""
        ranks = world_ranks(self._comm)
        calls = [
            {"sequence": record.sequence, "what": record.what, "place": record.place}
            for record in self.records
        ]
        last = self.records[-1] if self.records else None
        waits_for = [ranks[peer] for peer in getattr(last and last.handle, "waits_for", [])]
        heard = {ranks[peer]: told for peer, told in self._heard.items()}
        return {"name": self._name, "ranks": ranks, "calls": calls, "waits_for": waits_for} | {
            "waiting": self._next_telling + 1.0 > time.time(),
            "heard": heard,
        }

    def close(self) -> None:
        """Read what other watchdogs sent, so that no message is left over."""
        _live.discard(self)
        self._hear()
        MPI.Request.Testall(self._sends)

    def goodbye(self) -> None:
        """Tell the others that this rank's program ends."""
        done = max((record.sequence for record in self.records), default=0)
        self._send(
            {"sequence": done, "what": "the end of its program", "left": True}, self._peers()
        )

    def _peers(self) -> list[int]:
        rank, size = self._comm.rank, self._comm.size
        if size <= EVERYONE:
            return [peer for peer in range(size) if peer != rank]
        return [(rank - 1) % size, (rank + 1) % size]

    def _tell(self, record: Record, waited: float) -> None:
        """Tell the others, now and again, ever more rarely, what this rank waits in."""
        now = time.time()
        if waited > 1.0 and now < self._next_telling:
            return
        again = min(max(1.0, waited / 2), 10.0)
        self._next_telling = now + again
        # this rank still waits there, or says so again, until then
        self._send(
            {"sequence": record.sequence, "what": record.what, "sends_to": record.sends_to}
            | {"until": now + 2 * again},
            self._peers(),
        )

    def _send(self, told: dict, peers: Iterable[int]) -> None:
        data = np.frombuffer(json.dumps(told).encode(), np.uint8)
        for peer in peers:
            self._sends.append(self._comm.Isend([data, data.size, MPI.BYTE], peer, TAG))

    def _hear(self) -> None:
        """Read what the others told; any thread may do it for any communicator."""
        global _asked
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, TAG, status)) is not None:
            data = np.empty(status.count, np.uint8)
            message.Recv([data, data.size, MPI.BYTE])
            told = json.loads(data.tobytes())
            if "report" in told:
                _asked = True
            else:
                self._heard[status.source] = told

    def _waiting(self) -> dict[int, dict]:
        """What the ranks that still wait have told."""
        now = time.time()
        return {peer: heard for peer, heard in self._heard.items() if heard.get("until", 0) > now}

    def _compare(self) -> None:
        mine = {record.sequence: record.what for record in self.records if record.sequence}
        for heard in self._heard.values():
            number = heard["sequence"]
            if "left" in heard or mine.get(number, heard["what"]) == heard["what"]:
                continue
            called = {p: h["what"] for p, h in self._heard.items() if h["sequence"] == number}
            raise MismatchError(
                f"the ranks of communicator {self._name!r} do not agree on collective #{number}: "
                + describe_groups({**called, self._comm.rank: mine[number]})
                + ". Every rank of a group calls the same collectives in the same order with "
                "matching arguments; check=True finds this at once"
            )

    def _find_destroyed(self, record: Record) -> None:
        """Some ranks destroy the communicator, and others wait in a later call of it."""
        mine = self._comm.rank, record.sequence, record.what
        for peer, heard in self._heard.items():
            theirs = peer, heard["sequence"], heard["what"]
            for (one, number, what), (other, later, call) in ((theirs, mine), (mine, theirs)):
                if what != DESTROY or call == DESTROY or number > later or "left" in heard:
                    continue
                raise MismatchError(
                    f"rank {one} of communicator {self._name!r} destroys it after collective "
                    f"#{number - 1}, and rank {other} waits in #{later} {call}. Every rank of a "
                    "group calls the same collectives, then destroys it; leaving a `with` block "
                    "destroys too"
                )

    def _find_crossed(self, record: Record) -> None:
        """This rank destroys this communicator first, a rank that it waits for calls another."""
        if record.what != DESTROY:
            return
        here = world_ranks(self._comm)
        for flight in tuple(_live):
            done = max((record.sequence for record in flight.records), default=0)
            there = world_ranks(flight._comm)
            for peer, told in flight._waiting().items():
                if told["sequence"] > done and there[peer] in here and flight is not self:
                    raise MismatchError(
                        f"rank {self._comm.rank} of communicator {self._name!r} destroys it, and "
                        f"rank {here.index(there[peer])} has not come there: it waits in "
                        f"#{told['sequence']} {told['what']} of communicator {flight._name!r}. "
                        "Every rank calls collectives, and destroys communicators, in the same "
                        "order; leaving a `with` block destroys too"
                    )

    def _find_left(self, record: Record) -> None:
        for peer, heard in self._heard.items():
            if "left" in heard and heard["sequence"] < record.sequence:
                raise MismatchError(
                    f"rank {peer} of communicator {self._name!r} has ended its program after "
                    f"collective #{heard['sequence']}, and rank {self._comm.rank} waits in "
                    f"{record.text()}. Every rank of a group calls the same collectives"
                )

    def _find_ring(self, record: Record) -> None:
        waiting = self._waiting()
        chain, peer = [self._comm.rank], record.sends_to
        while peer >= 0 and peer not in chain:
            chain.append(peer)
            peer = waiting[peer]["sends_to"] if peer in waiting else -1
        if peer == self._comm.rank:
            path = " -> ".join(map(str, [*chain, peer]))
            raise MismatchError(
                f"a ring of blocking sends on communicator {self._name!r}: {path}; each rank waits "
                "for the next to receive. Use shift(x), or send(..., async_op=True)"
            )

    def _others(self, record: Record) -> str:
        waiting = self._waiting()
        known = [f"rank {p} waits in #{h['sequence']} {h['what']}" for p, h in waiting.items()]
        silent = [p for p in self._peers() if p not in waiting]
        if silent:
            known.append(f"ranks {silent} are not waiting on this communicator")
        return "; ".join(known)


_numbers = count()  # in the order of their making, which is that of every rank
_live: "weakref.WeakSet[Flight]" = weakref.WeakSet()
_asked = False  # another rank wants everyone's report


def abandon() -> list[MPI.Comm]:
    """Watch no communicator any more, since ranks are gone; return those there were."""
    comms = [flight._comm for flight in tuple(_live)]
    _live.clear()
    return comms


def _ask_everyone() -> None:
    """Ask all ranks that this one shares a communicator with for their reports.

    In large groups it asks those 1, 2, 4, ... ranks away, and they ask on.
    """
    for flight in tuple(_live):
        rank, size = flight._comm.rank, flight._comm.size
        steps = [1 << i for i in range(size.bit_length())]
        far = {(rank + sign * step) % size for step in steps for sign in (1, -1)} - {rank}
        flight._send({"report": True}, far if size > EVERYONE else flight._peers())


def _pass_on() -> None:
    """Write the report that another rank has asked for, and ask the others too, once."""
    if not report.written():
        report.write("another rank has found something wrong", _live, failed=True)
        _ask_everyone()


@atexit.register
def _say_goodbye() -> None:
    """Before MPI is finalised, so that a rank that leaves early is known by name."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for flight in tuple(_live):
            flight.goodbye()


def describe_groups(called: dict[int, str]) -> str:
    """Return "ranks 0, 1: A; rank 2: B" from a text for each rank."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(called):
        ranks.setdefault(called[rank], []).append(rank)
    parts = []
    for what, members in ranks.items():
        who = "rank" if len(members) == 1 else "ranks"
        parts.append(f"{who} {', '.join(map(str, members))}: {what}")
    return "; ".join(parts)
