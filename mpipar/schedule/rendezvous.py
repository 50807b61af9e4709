"""Run all ranks of a schedule in one process, with synchronous sends; `verify` and `replay` use it.

A round's operations are posted together, and a rank goes on when all of them are complete.  A
message is complete when both its ends are posted: no send completes before its receive.  A rank is
in one round at a time, so between two ranks at most one message is open in each direction:

    rank 0, round 3: sends {1: chunks [4]}    receives {2: ops [RecvReduce(2, 5)]}
    rank 1, round 2:                          receives {0: ops [Recv(0, 4)]}     -> the two meet

A schedule that ends here also ends with eager sends: these only let a rank go on earlier.  Values
do not depend on the order in which ready ranks run, since each message goes to one known receive,
and since a read takes the value at the start of its round, from the history that the ranks of a
shared schedule keep (history.py).
"""

from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from mpipar.errors import ScheduleError, explain
from mpipar.schedule.core import CommSchedule, Op, Read, ReadReduce, Recv, RecvReduce, Round, Send
from mpipar.schedule.history import History

Value = Any
State = dict[int, Value]  # the values of one rank, by chunk
Operands = list[tuple[int, Value]]  # (the rank a value comes from, the value), in rank order


class Place:
    """Where one rank is: its round, what is open in it, and the values that it holds."""

    __slots__ = (
        "arrived",
        "ended",
        "history",
        "number",
        "rank",
        "reads",
        "receives",
        "replaced",
        "rounds",
        "sends",
        "unread",
        "values",
        "whence",
    )

    def __init__(self, rank: int, rounds: Iterator[Round], values: State, shared: bool) -> None:
        """Stand before the first round, with the values that the rank starts with."""
        self.rank = rank
        self.rounds = rounds
        self.values = values
        self.number = -1  # of the round
        self.ended = False
        self.sends: dict[int, list[int]] = {}  # by peer: the chunks of the open message
        self.receives: dict[int, list[Op]] = {}  # by peer: the operations that await its message
        self.reads: dict[int, list[Op]] = {}  # by peer: the reads that await its coming here
        self.history = History(values) if shared else None  # what others may read
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
            return f"which rank {self.rank} had from the start, before round 0"
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
    shared = bool(schedule.shared)
    places = [Place(r, schedule.rounds(r), start[r], shared) for r in range(schedule.ranks)]
    ready = deque(places)
    while ready:
        place = ready.popleft()
        ops = next(place.rounds, None)
        if ops is None:
            place.ended = True
        else:
            place.number += 1
            _post(schedule, place, ops)
        for other in places if shared else ():
            if other is not place and _read(schedule, place, other) and not _open(other):
                _finish(schedule, other, combine)
                ready.append(other)
        if ops is None:
            continue
        for peer in list(place.reads):
            _read(schedule, places[peer], place)
        for peer in [*place.sends, *place.receives]:
            other = places[peer]
            met = _meet(schedule, place, other) if peer in place.sends else False
            met |= _meet(schedule, other, place) if peer in place.receives else False
            if met and not _open(other):
                _finish(schedule, other, combine)
                ready.append(other)
        if not _open(place):
            _finish(schedule, place, combine)
            ready.append(place)
    if not all(place.ended for place in places):
        raise fault(schedule, _deadlock(schedule, places), "Give every message both its ends")
    for place in places:
        for chunk in sorted(_unused(place).difference(schedule.final(place.rank))):
            raise _lost(schedule, place, chunk, "and the rank has ended")
        for chunk, number in place.history.lost if place.history is not None else ():
            raise _lost(
                schedule, place, chunk, f"when rank {place.rank} in round {number} replaces it"
            )
    return places


def _open(place: Place) -> bool:
    """Say whether something of the place's round is not complete yet."""
    return bool(place.sends or place.receives or place.reads)


def _unused(place: Place) -> set[int]:
    """Return the chunks that had a value that was never sent, added to, nor read."""
    if place.history is None:
        return place.unread
    return {chunk for chunk in place.unread if not place.history.was_used(chunk)}


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
            if place.history is not None:
                place.history.use(chunk)
            place.sends.setdefault(peer, []).append(chunk)
            continue
        if type(op) is Recv or type(op) is Read:
            if chunk in place.replaced:
                what = f"{place} replaces chunk {chunk} twice, the second time from rank {peer}"
                raise fault(schedule, what, "Receive it once in a round")
            place.replaced.add(chunk)
        if type(op) is Read or type(op) is ReadReduce:
            if not _one_node(schedule, rank, peer):
                what = f"{place} reads chunk {chunk} of rank {peer}, with which it shares no memory"
                raise fault(schedule, what, "Read on the own node, or send a message")
            place.reads.setdefault(peer, []).append(op)
        else:
            place.receives.setdefault(peer, []).append(op)


def _one_node(schedule: CommSchedule, rank: int, peer: int) -> bool:
    """Say whether two ranks can read each other's memory."""
    first = 0
    for count in schedule.shared:
        if first <= rank < first + count:
            return first <= peer < first + count
        first += count
    return False


def _read(schedule: CommSchedule, source: Place, reader: Place) -> bool:
    """Complete what `reader` reads of `source`, if that has come to the same round."""
    if source.rank not in reader.reads or not (source.ended or source.number >= reader.number):
        return False
    assert source.history is not None
    for op in reader.reads.pop(source.rank):
        chunk = op.chunk
        version = source.history.read(chunk, reader.number)
        if version is None:
            what = (
                f"{reader} reads chunk {chunk} of rank {source.rank}, which has no value for it "
                "at the start of that round"
            )
            raise fault(schedule, what, "Read it later")
        reader.arrived.setdefault(chunk, []).append((source.rank, version.value))
    return True


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
            if place.history is not None:
                place.history.use(chunk)
        elif chunk in place.unread and place.history is None:
            raise _lost(schedule, place, chunk, f"when {place} replaces it")
        if len(operands) > 1:
            operands.sort(key=itemgetter(0))
        place.values[chunk] = combine(place, chunk, operands)
        if place.history is not None:
            place.history.write(chunk, place.number + 1, place.values[chunk])
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
    waits = [(peer, f"to send chunks {chunks} to") for peer, chunks in place.sends.items()]
    for words, found in (
        ("for chunks {} from", place.receives),
        ("to read chunks {} of", place.reads),
    ):
        chunks_of = {peer: [op.chunk for op in ops] for peer, ops in found.items()}
        waits += [(peer, words.format(chunks)) for peer, chunks in chunks_of.items()]
    peer, what = min(waits, key=lambda wait: not places[wait[0]].ended)
    return f"{place} waits {what} rank {peer}", places[peer]


def _ends_with_eager_sends(schedule: CommSchedule) -> bool:
    """Say whether every rank ends where sends complete at once and only receives wait."""
    sent: dict[tuple[int, int], int] = {}
    programs = {rank: schedule.rounds(rank) for rank in range(schedule.ranks)}
    waits: dict[int, set[int]] = {rank: set() for rank in programs}
    reads: dict[int, set[int]] = {rank: set() for rank in programs}
    number = dict.fromkeys(programs, -1)
    going = True
    while going:
        going = False
        for rank in list(programs):
            if any(not sent.get((peer, rank)) for peer in waits[rank]):
                continue
            if any(peer in programs and number[peer] < number[rank] for peer in reads[rank]):
                continue
            going = True
            number[rank] += 1
            for peer in waits[rank]:
                sent[peer, rank] -= 1
            ops = next(programs[rank], None)
            if ops is None:
                del programs[rank]
                continue
            waits[rank] = {op.peer for op in ops if type(op) in (Recv, RecvReduce)}
            reads[rank] = {op.peer for op in ops if type(op) in (Read, ReadReduce)}
            for peer in {op.peer for op in ops if type(op) is Send}:
                sent[rank, peer] = sent.get((rank, peer), 0) + 1
    return not programs
