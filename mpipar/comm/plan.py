"""A schedule compiled for one rank: where every chunk lies, what is posted, what is added.

A schedule speaks of chunks; memory is the business of the plan.  A chunk that a rank starts with
lies in the INPUT.  When a step writes a chunk, its value moves to the OUTPUT if the chunk belongs
to the result, else to KEEP.  Nothing is copied that need not be: the first addition of an
all_reduce reads the caller's array and the received piece, and writes the result.

    step i:    receives and sends are posted together
               ... all receives complete ...
    step i+1:  what does not depend on step i's additions is posted ("early")
               step i's additions run, while step i+1's messages travel
               the rest of step i+1 is posted ("late")

A send may outlive its step: it must be complete only before its memory is written again, and the
plan says when that is.

Received values that must be added land in SCRATCH, in two halves used in turn, because step i+1
receives while step i is being added.  All positions are counted in elements.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.partition import block as block_slice
from mpipar.schedule import CommSchedule, Recv, Send

INPUT, OUTPUT, KEEP, SCRATCH = 0, 1, 2, 3  # SCRATCH is 3 for even steps and 4 for odd ones
SPACES = 5
ADDS_ALL_AT_ONCE = ("direct", "linear")


class Place(NamedTuple):
    """A range of elements in one of the spaces."""

    space: int
    start: int
    stop: int

    def followed_by(self, other: "Place") -> bool:
        """Say whether `other` begins where this one ends."""
        return self.space == other.space and self.stop == other.start


class Message(NamedTuple):
    """All that travels to or from one peer in a step, as one piece of memory."""

    peer: int
    place: Place


class Fold(NamedTuple):
    """out = operands added from left to right; one operand means a copy."""

    out: Place
    operands: tuple[Place, ...]


@dataclass(slots=True)
class Step:
    """One round of this rank.

    `post_after` and `fold_after` are the last steps whose sends must be complete before this one's
    messages are posted and before its additions run; -1 is none.
    """

    early_receives: list[Message] = field(default_factory=list)
    late_receives: list[Message] = field(default_factory=list)
    early_sends: list[Message] = field(default_factory=list)
    late_sends: list[Message] = field(default_factory=list)
    packs: list[Fold] = field(default_factory=list)  # copies made before the late sends
    folds: list[Fold] = field(default_factory=list)  # additions and copies after completion
    post_after: int = -1
    fold_after: int = -1


@dataclass(slots=True)
class Plan:
    """What one rank does; `sizes[space]` is the number of elements of each space."""

    steps: list[Step]
    copies: list[Fold]  # input chunks that are part of the result untouched
    sizes: list[int]
    divides: bool  # every addition has all ranks' operands, so a mean is divided inside it


class Layout(NamedTuple):
    """Where blocks lie: sizes of all blocks, starts of those in the input and in the output."""

    sizes: Sequence[int]
    input: dict[int, int]
    output: dict[int, int]


def compile_plan(schedule: CommSchedule, rank: int, layout: Layout) -> Plan:
    """Compile the rounds of `rank`; the cost is that of walking them once."""
    return _Compiler(schedule, rank, layout).compile()


class _Compiler:
    def __init__(self, schedule: CommSchedule, rank: int, layout: Layout) -> None:
        self.schedule, self.rank, self.layout = schedule, rank, layout
        self.sizes = [0] * SPACES
        self.where = {c: self._place(c, INPUT, layout.input) for c in schedule.initial(rank)}
        self.target = {c: self._place(c, OUTPUT, layout.output) for c in schedule.final(rank)}
        self.sizes[INPUT] = max((place.stop for place in self.where.values()), default=0)
        self.sizes[OUTPUT] = max((place.stop for place in self.target.values()), default=0)
        self.folded: set[int] = set()  # chunks that the previous step adds
        self.sent_in: dict[int, int] = {}  # the last step that sends a chunk
        self.packed_in: set[int] = set()  # steps that send from scratch

    def compile(self) -> Plan:
        steps = [
            self._step(ops, number)
            for number, ops in enumerate(ops for ops in self.schedule.rounds(self.rank) if ops)
        ]
        copies = [
            Fold(target, (self.where[chunk],))
            for chunk, target in self.target.items()
            if target.space == OUTPUT and self.where[chunk].space == INPUT
        ]
        divides = self.schedule.algorithm in ADDS_ALL_AT_ONCE
        return Plan(steps, _merge_folds(copies), self.sizes, divides)

    def _place(self, chunk: int, space: int, starts: dict[int, int]) -> Place:
        block, part = divmod(chunk, self.schedule.parts)
        cut = block_slice(self.layout.sizes[block], self.schedule.parts, part)
        return Place(space, starts[block] + cut.start, starts[block] + cut.stop)

    def _length(self, chunk: int) -> int:
        block, part = divmod(chunk, self.schedule.parts)
        cut = block_slice(self.layout.sizes[block], self.schedule.parts, part)
        return cut.stop - cut.start

    def _home(self, chunk: int) -> Place:
        """Where a written chunk lives from now on."""
        place = self.target.get(chunk)
        if place is None:
            start = self.sizes[KEEP]
            self.sizes[KEEP] += self._length(chunk)
            place = self.target[chunk] = Place(KEEP, start, self.sizes[KEEP])
        return place

    def _step(self, ops: tuple, number: int) -> Step:
        step = Step()
        scratch = _Scratch(SCRATCH + number % 2)
        sent: dict[int, list[int]] = {}
        received: dict[int, list] = {}
        for op in ops:
            if type(op) is Send:
                sent.setdefault(op.peer, []).append(op.chunk)
            else:
                received.setdefault(op.peer, []).append(op)
        for peer, chunks in sent.items():
            self._send(step, peer, chunks, scratch)
        operands: dict[int, list[tuple[int, Place]]] = {}
        replaced: set[int] = set()
        moved: dict[int, Place] = {}
        busy = {chunk for chunks in sent.values() for chunk in chunks}
        counts = _occurrences(received)
        for peer, listed in received.items():
            homes = self._direct(listed, busy, counts)
            if homes is not None:
                chunks = [op.chunk for op in listed]
                step.post_after = max(step.post_after, self._last_sent(chunks))
                late = not self.folded.isdisjoint(chunks)
                (step.late_receives if late else step.early_receives).append(
                    Message(peer, _merge(homes)[0])
                )
                moved.update(zip(chunks, homes, strict=True))
                continue
            places = [scratch.take(self._length(op.chunk)) for op in listed]
            step.early_receives.append(Message(peer, _merge(places)[0]))
            for op, place in zip(listed, places, strict=True):
                operands.setdefault(op.chunk, []).append((peer, place))
                if type(op) is Recv:
                    replaced.add(op.chunk)
        folds = []
        for chunk, terms in operands.items():
            if chunk in self.where and chunk not in replaced:
                terms.append((self.rank, self.where[chunk]))
            terms.sort()
            out = moved[chunk] = self._home(chunk)
            folds.append(Fold(out, tuple(place for _, place in terms)))
        step.folds = _merge_folds(folds)
        if number - 2 in self.packed_in:  # this step reuses that half of the scratch
            step.post_after = max(step.post_after, number - 2)
        if step.packs:
            self.packed_in.add(number)
        self.sent_in.update(dict.fromkeys(busy, number))
        step.fold_after = self._last_sent(operands)
        self.where.update(moved)
        self.folded = set(operands)
        self.sizes[scratch.space] = max(self.sizes[scratch.space], scratch.used)
        return step

    def _last_sent(self, chunks: Iterable[int]) -> int:
        return max((self.sent_in.get(chunk, -1) for chunk in chunks), default=-1)

    def _send(self, step: Step, peer: int, chunks: list[int], scratch: "_Scratch") -> None:
        places = _merge([self.where[chunk] for chunk in chunks])
        late = not self.folded.isdisjoint(chunks)
        if len(places) > 1:
            packed = [scratch.take(place.stop - place.start) for place in places]
            step.packs += [Fold(a, (b,)) for a, b in zip(packed, places, strict=True)]
            places, late = _merge(packed), True
        (step.late_sends if late else step.early_sends).append(Message(peer, places[0]))

    def _direct(self, listed: list, busy: set[int], counts: dict[int, int]) -> list[Place] | None:
        """Return the homes of the received chunks if the message can land there as one piece."""
        if any(type(op) is not Recv or op.chunk in busy or counts[op.chunk] > 1 for op in listed):
            return None
        homes = [self._home(op.chunk) for op in listed]
        return homes if len(_merge(homes)) == 1 else None


class _Scratch:
    """Hands out consecutive pieces of one half of the scratch space."""

    def __init__(self, space: int) -> None:
        self.space, self.used = space, 0

    def take(self, length: int) -> Place:
        self.used += length
        return Place(self.space, self.used - length, self.used)


def _occurrences(received: dict[int, list]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for listed in received.values():
        for op in listed:
            counts[op.chunk] = counts.get(op.chunk, 0) + 1
    return counts


def _merge(places: Iterable[Place]) -> list[Place]:
    """Join neighbours in memory, keeping the order."""
    merged: list[Place] = []
    for place in places:
        if merged and merged[-1].followed_by(place):
            merged[-1] = Place(place.space, merged[-1].start, place.stop)
        elif place.start == place.stop and merged:
            continue
        elif merged and merged[-1].start == merged[-1].stop:
            merged[-1] = place
        else:
            merged.append(place)
    return merged


def _merge_folds(folds: list[Fold]) -> list[Fold]:
    """Join additions whose results and operands are neighbours in memory, and drop empty ones."""
    merged: list[Fold] = []
    for fold in sorted(folds):
        if fold.out.start == fold.out.stop:
            continue
        if merged and len(merged[-1].operands) == len(fold.operands):
            old = merged[-1]
            pairs = list(zip((old.out, *old.operands), (fold.out, *fold.operands), strict=True))
            if all(a.followed_by(b) for a, b in pairs):
                joined = [Place(a.space, a.start, b.stop) for a, b in pairs]
                merged[-1] = Fold(joined[0], tuple(joined[1:]))
                continue
        merged.append(fold)
    return merged
