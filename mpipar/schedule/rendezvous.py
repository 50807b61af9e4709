"""Run all ranks of a schedule in one process, with synchronous sends; `verify` and `replay` use it.

A round's operations are posted together, and a rank goes on when all of them are complete.  A
message is complete when both its ends are posted: no send completes before its receive.  A rank is
in one round at a time, so between two ranks at most one message is open in each direction:

    rank 0, round 3: sends {1: chunks [4]}    receives {2: ops [RecvReduce(2, 5)]}
    rank 1, round 2:                          receives {0: ops [Recv(0, 4)]}     -> the two meet

A schedule that ends here also ends with eager sends: these only let a rank go on earlier.  Values
do not depend on the order in which ready ranks run, since each message goes to one known receive.
"""

from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from mpipar.errors import ScheduleError, explain
from mpipar.schedule.core import CommSchedule, Op, Recv, Round, Send

Value = Any
State = dict[int, Value]  # the values of one rank, by chunk
Operands = list[tuple[int, Value]]  # (the rank a value comes from, the value), in rank order


class Place:
    """Where one rank is: its round, what is open in it, and the values that it holds."""

    __slots__ = (
        "arrived",
        "ended",
        "number",
        "rank",
        "receives",
        "replaced",
        "rounds",
        "sends",
        "unread",
        "values",
        "whence",
    )

    def __init__(self, rank: int, rounds: Iterator[Round], values: State) -> None:
        """Stand before the first round, with the values that the rank starts with."""
        self.rank = rank
        self.rounds = rounds
        self.values = values
        self.number = -1  # of the round
        self.ended = False
        self.sends: dict[int, list[int]] = {}  # by peer: the chunks of the open message
        self.receives: dict[int, list[Op]] = {}  # by peer: the operations that await its message
        self.arrived: dict[int, Operands] = {}  # by chunk: what came in this round
        self.replaced: set[int] = set()  # chunks whose own value a Recv of this round replaces
        self.unread = set(values)  # chunks whose values were neither sent nor added to since
        self.whence: dict[int, list[tuple[int, int]]] = {}  # by chunk: (peer, round) of its parts

    def __str__(self) -> str:
        """Return the words that an error names the place by."""
        return f"rank {self.rank} in round {self.number}"

    def origin(self, chunk: int) -> str:
        """Say where the value of a chunk comes from."""
        if chunk not in self.whence:
            return f"which rank {self.rank} had from the start"
        parts = [f"from rank {peer} in round {number}" for peer, number in self.whence[chunk]]
        return f"which rank {self.rank} received {' and '.join(parts)}"


# Makes a chunk's new value of the operands that meet there; the place still holds the old one.
Combine = Callable[[Place, int, Operands], Value]


def execute(schedule: CommSchedule, start: list[State], combine: Combine) -> list[Place]:
    """Run every rank to its end and return where each is then, with the values that it holds.

    Raises ScheduleError, naming rounds, ranks and chunk: for a message whose ends differ, a
    deadlock, a message with only one end, a value that is read before it is there, or one that is
    lost: brought or received, and never used.
    """
    places = [Place(r, schedule.rounds(r), start[r]) for r in range(schedule.ranks)]
    ready = deque(places)
    while ready:
        place = ready.popleft()
        ops = next(place.rounds, None)
        if ops is None:
            place.ended = True
            continue
        place.number += 1
        _post(schedule, place, ops)
        for peer in [*place.sends, *place.receives]:
            other = places[peer]
            met = _meet(schedule, place, other) if peer in place.sends else False
            met |= _meet(schedule, other, place) if peer in place.receives else False
            if met and not (other.sends or other.receives):
                _finish(schedule, other, combine)
                ready.append(other)
        if not (place.sends or place.receives):
            _finish(schedule, place, combine)
            ready.append(place)
    if not all(place.ended for place in places):
        raise fault(schedule, _deadlock(schedule, places), "Give every message both its ends")
    for place in places:
        for chunk in sorted(place.unread.difference(schedule.final(place.rank))):
            raise _lost(schedule, place, chunk, "and the rank has ended")
    return places


def fault(schedule: CommSchedule, what: str, fix: str) -> ScheduleError:
    """Return the error that says what is wrong where."""
    return ScheduleError(explain("schedule", f"{schedule.name} p={schedule.ranks}", what, fix))


def _post(schedule: CommSchedule, place: Place, ops: Round) -> None:
    """Open the messages of a round."""
    rank, values = place.rank, place.values
    for op in ops:
        peer, chunk = op
        if not (0 <= peer < schedule.ranks and 0 <= chunk < schedule.chunks) or peer == rank:
            what = f"{place}: {op} names a peer or a chunk that it cannot deal with"
            raise fault(schedule, what, "Use other ranks and existing chunks")
        if type(op) is Send:
            if chunk not in values:
                what = f"{place} sends chunk {chunk} to rank {peer}, but has no value for it yet"
                raise fault(schedule, what, "Receive it before")
            place.unread.discard(chunk)
            place.sends.setdefault(peer, []).append(chunk)
            continue
        if type(op) is Recv:
            if chunk in place.replaced:
                what = f"{place} replaces chunk {chunk} twice, the second time from rank {peer}"
                raise fault(schedule, what, "Receive it once in a round")
            place.replaced.add(chunk)
        place.receives.setdefault(peer, []).append(op)


def _meet(schedule: CommSchedule, source: Place, target: Place) -> bool:
    """Complete the open message from source to target, if both its ends are posted."""
    chunks = source.sends.get(target.rank)
    ops = target.receives.get(source.rank)
    if chunks is None or ops is None:
        return False
    if chunks != [op.chunk for op in ops]:
        what = (
            f"{source} sends chunks {chunks} to rank {target.rank}, where {target} expects chunks "
            f"{[op.chunk for op in ops]} from rank {source.rank}"
        )
        raise fault(schedule, what, "List the same chunks in the same order at both ends")
    del source.sends[target.rank], target.receives[source.rank]
    for chunk in chunks:
        operand = (source.rank, source.values[chunk])
        target.arrived.setdefault(chunk, []).append(operand)
    return True


def _finish(schedule: CommSchedule, place: Place, combine: Combine) -> None:
    """Give the chunks that were received in a round their new values."""
    for chunk, operands in place.arrived.items():
        parts = [(peer, place.number) for peer, _ in operands]
        if chunk not in place.replaced:
            if chunk not in place.values:
                source = operands[0][0]
                what = f"{place} adds chunk {chunk} from rank {source} to a value that is not there"
                raise fault(schedule, what, "Receive it with Recv")
            operands.append((place.rank, place.values[chunk]))
            parts = [*place.whence.get(chunk, ()), *parts]
        elif chunk in place.unread:
            raise _lost(schedule, place, chunk, f"when {place} replaces it")
        if len(operands) > 1:
            operands.sort(key=itemgetter(0))
        place.values[chunk] = combine(place, chunk, operands)
        place.unread.add(chunk)
        place.whence[chunk] = parts
    place.arrived.clear()
    place.replaced.clear()


def _lost(schedule: CommSchedule, place: Place, chunk: int, when: str) -> ScheduleError:
    what = f"chunk {chunk}, {place.origin(chunk)}, has not been used {when}"
    return fault(schedule, what, "Send it, add to it, or leave the message out")


def _deadlock(schedule: CommSchedule, places: list[Place]) -> str:
    """Say who waits for whom, from a rank that is stuck to an ended one or round a circle."""
    stuck = [place for place in places if not place.ended]
    place = min(stuck, key=lambda p: (not _awaited(places, p)[1].ended, p.number, p.rank))
    chain: list[Place] = []
    while place not in chain and not place.ended:
        chain.append(place)
        place = _awaited(places, place)[1]
    waits = "; ".join(_awaited(places, link)[0] for link in chain)
    if place.ended:
        return f"{waits}; but rank {place.rank} has ended: the message has only one end"
    eager = "eager sends would end" if _ends_with_eager_sends(schedule) else "with eager ones too"
    return f"deadlock with synchronous sends ({eager}): {waits}"


def _awaited(places: list[Place], place: Place) -> tuple[str, Place]:
    """Say what a stuck rank waits for, and return whom; an ended rank comes first."""
    waits = [
        (f"{place} waits to send chunks {chunks} to rank {peer}", places[peer])
        for peer, chunks in place.sends.items()
    ] + [
        (f"{place} waits for chunks {[op.chunk for op in ops]} from rank {peer}", places[peer])
        for peer, ops in place.receives.items()
    ]
    return min(waits, key=lambda wait: not wait[1].ended)


def _ends_with_eager_sends(schedule: CommSchedule) -> bool:
    """Say whether every rank ends where sends complete at once and only receives wait."""
    sent: dict[tuple[int, int], int] = {}
    programs = {rank: schedule.rounds(rank) for rank in range(schedule.ranks)}
    waits: dict[int, set[int]] = {rank: set() for rank in programs}
    going = True
    while going:
        going = False
        for rank in list(programs):
            if any(not sent.get((peer, rank)) for peer in waits[rank]):
                continue
            going = True
            for peer in waits[rank]:
                sent[peer, rank] -= 1
            ops = next(programs[rank], None)
            if ops is None:
                del programs[rank]
                continue
            waits[rank] = {op.peer for op in ops if type(op) is not Send}
            for peer in {op.peer for op in ops if type(op) is Send}:
                sent[rank, peer] = sent.get((rank, peer), 0) + 1
    return not programs
