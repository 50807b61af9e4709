"""What a schedule costs on a network: the alpha-beta-gamma model with two levels.

The model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005, section 3), kept to these rules:

- A message of n bytes takes alpha + n beta seconds, n added bytes take n gamma.  Alpha and beta
  have one value inside a node and one between nodes.
- A rank sends one message at a time, in the order listed, and takes in one at a time, in the order
  in which they arrive, both at once.  It does so inside its node, and at the same time also between
  nodes: these are different wires.
- In shared memory nothing is sent: a reader waits until the rank it reads from has come to its
  round, and then takes alpha + n beta of a node for each rank that it reads from, one by one.
- Sends are eager: a message travels whether or not its receiver has come to its round.
- A round ends when its sends are out and its receives in.  Then its additions run, while what
  does not depend on them travels already: a message of the next round that holds a chunk just
  added waits for the additions.  (The executor in mpipar.comm does the same.)
- With `shared`, the ranks of a node that ever talk to other nodes share the node's link evenly:
  beta between nodes is multiplied by how many they are.

Every rank is a coroutine that stops where a message it needs has not been sent yet.  Time is only
computed, never waited for, so the order in which the ranks are run does not matter.

A schedule on many ranks is simulated through the classes of equivalent ranks that it declares
(`CommSchedule.symmetry`): only the representatives run, and a message from another rank is looked
up as the one that the representative of that rank sends.  A ring on 100,000 ranks is one coroutine.
"""

import gc
from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from operator import itemgetter

from mpipar.errors import ConfigError, ScheduleError, explain
from mpipar.schedule.core import (
    CommSchedule,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Round,
    Send,
    Symmetry,
)
from mpipar.schedule.network import CLUSTER, Network, chunk_bytes
from mpipar.trace import Span, Timeline

OPERATIONS = 50_000_000  # the most operations that one simulation goes through


@dataclass(frozen=True)
class Result:
    """What a simulation found.  Times are seconds, sizes bytes.

    `classes` lists (representative, number of ranks it stands for), and `finish` the time at which
    each representative is done; in the full expansion every rank stands for itself.  `messages`
    and `bytes_sent` count all ranks, `bytes_sent_max` the rank that sends most.  `timeline` holds
    the spans of the representatives, up to the number asked for.
    """

    makespan: float
    timeline: Timeline
    finish: dict[int, float]
    classes: tuple[tuple[int, int], ...]
    messages: int
    bytes_sent: float
    bytes_sent_max: float


def simulate(
    schedule: CommSchedule,
    bytes: float,
    network: Network = CLUSTER,
    sizes: Sequence[float] | None = None,
    full: bool = False,
    spans: int = 100_000,
) -> Result:
    """Return the time that `schedule` takes for a vector of `bytes`, and what each rank does when.

    Chunks are equal parts of `bytes` (see `chunk_bytes`), fractions of a byte allowed, or have
    the `sizes` given, in bytes by chunk id.  Only representatives are run if the schedule declares
    classes for the network's nodes; `full` and `sizes` run all ranks.  Without `network` it is a
    common cluster with one rank on each node.  The timeline keeps at most `spans` spans.

    Raises ScheduleError if the schedule waits for a message that is never sent, and where it takes
    more than OPERATIONS operations; ConfigError for sizes or nodes that do not fit.
    """
    if sizes is not None and len(sizes) != schedule.chunks:
        rule = f"{schedule.name} has {schedule.chunks} chunks"
        raise ConfigError(explain("len(sizes)", len(sizes), rule, "Pass one size for each"))
    nodes = network.layout(schedule.ranks)
    symmetry = None
    if not full and sizes is None and schedule.symmetry is not None:
        symmetry = schedule.symmetry(nodes)
        if network.shared and symmetry and not symmetry.exact and 1 < len(nodes) < schedule.ranks:
            symmetry = None  # ranks that are late no longer stay late if their links are faster
    if symmetry is None:
        _check_size(schedule)
    run = _Run(schedule, network, nodes, symmetry, spans)
    run.sizes, run.each = sizes, chunk_bytes(schedule, bytes)
    if network.shared:
        run.share_links()
    with _no_collection():
        run.go()
    return Result(
        makespan=max(run.finish.values()),
        timeline=run.timeline,
        finish=run.finish,
        classes=run.classes,
        messages=run.messages,
        bytes_sent=run.bytes_sent,
        bytes_sent_max=run.bytes_sent_max,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off: millions of small tuples live, in no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Wanted = tuple[int, int, int, int]  # key of the message, its receiver, round and sender
_Player = Iterator[_Wanted]
_Messages = tuple[
    Collection[tuple[bool, int, float]],
    Iterable[tuple[int, float]],
    float,
    Container[int],
    Iterable[tuple[int, float]],
]


class _Run:
    """The state of one simulation.  A message's key is sender * ranks + receiver."""

    sizes: Sequence[float] | None
    each: float

    def __init__(
        self,
        schedule: CommSchedule,
        network: Network,
        nodes: tuple[int, ...],
        symmetry: Symmetry | None,
        spans: int,
    ) -> None:
        self.schedule, self.network, self.nodes, self.room = schedule, network, nodes, spans
        ranks = range(schedule.ranks)
        self.link, self.key = lru_cache(4096)(self._link), lru_cache(4096)(self._key)
        self.view = symmetry.view if symmetry else None
        self.classes = symmetry.classes if symmetry else tuple((rank, 1) for rank in ranks)
        self.keep = symmetry is not None and not symmetry.exact  # several may read one message
        self.node = list(chain.from_iterable(repeat(i, n) for i, n in enumerate(nodes)))
        self.share: dict[int, int] = {}  # node -> ranks on its link, if links are shared
        self.posted = defaultdict[int, list[float]](list)  # key -> arrival times, as sent
        self.began = defaultdict[int, list[float]](list)  # rank -> begin of its rounds, if shared
        self.waiting: dict[int, list[tuple[_Player, _Wanted]]] = {}
        self.ready: deque[_Player] = deque()
        self.timeline, self.finish = Timeline(), dict[int, float]()
        self.operations = self.messages = 0
        self.bytes_sent = self.bytes_sent_max = 0.0

    def go(self) -> None:
        """Run all coroutines to their ends."""
        for rank, count in self.classes:
            self._resume(self._play(rank, count))
            while self.ready:
                self._resume(self.ready.popleft())
        for waiters in self.waiting.values():
            _, rank, index, peer = waiters[0][1]
            raise ScheduleError(
                f"{self.schedule.name} on {self.schedule.ranks} ranks does not end: rank {rank} "
                f"waits in its round {index} for a message that rank {peer} never sends"
            )

    def _resume(self, player: _Player) -> None:
        wanted = next(player, None)
        if wanted is not None:
            self.waiting.setdefault(wanted[0], []).append((player, wanted))

    def _play(self, rank: int, count: int) -> _Player:
        """Compute one rank's times, yielding where it needs a message that is not sent yet."""
        p, gamma, link, key_of = self.schedule.ranks, self.network.gamma, self.link, self.key
        posted, waiting, keep, taken = self.posted, self.waiting, self.keep, dict[int, int]()
        now = added = 0.0  # when the round begins, and when additions end
        ports = [0.0, 0.0]  # when the last message is in, between nodes and inside
        sent_bytes, sent_messages = 0.0, 0
        fresh: Container[int] = ()  # the chunks that are being added
        for index, ops in enumerate(self.schedule.rounds(rank)):
            if self.schedule.shared:
                self._begin(rank, max(now, added))
            sends, receives, addition, fresh, reads = self._messages(ops, fresh)
            out, room = [now, now], self.room  # room: whether spans are still kept
            for late, peer, size in sends:
                alpha, beta, near = link(rank, peer)
                start = added if late and added > out[near] else out[near]
                sent = out[near] = start + alpha + size * beta
                sent_bytes += size
                sent_messages += 1
                key = rank * p + peer
                posted[key].append(sent)
                if key in waiting:
                    self._wake(key)
                if room:
                    self._note(rank, f"to {peer}", "send", start, sent, peer, size)
            arrived = []
            for peer, size in receives:
                key = key_of(peer, rank)
                queue, place = posted[key], taken.get(key, 0)
                while len(queue) <= place:
                    yield key, rank, index, peer
                if keep:
                    taken[key] = place + 1
                arrived.append((queue[place] if keep else queue.pop(0), peer, size))
            if len(arrived) > 1:
                arrived.sort()
            for arrival, peer, size in arrived:
                _, beta, near = link(rank, peer)
                flow = size * beta
                port = ports[near] = max(arrival, ports[near] + flow)
                if room:
                    self._note(rank, f"from {peer}", "recv", port - flow, port, peer, size)
            done = max(*out, *ports)
            for peer, size in reads:
                source = self.view(peer, rank)[0] if self.view else peer
                while len(self.began[source]) <= index and source not in self.finish:
                    yield -1 - source, rank, index, peer
                there = self.began[source][index:] or [self.finish[source]]
                alpha, beta, _ = link(rank, peer)
                start = max(done, there[0])
                done = start + alpha + size * beta
                if room:
                    self._note(rank, f"read {peer}", "recv", start, done, peer, size)
            now = max(done, added)
            if addition:
                added = now + addition * gamma
                if room:
                    self._note(rank, "add", "reduce", now, added, None, addition)
        self.finish[rank] = max(now, added)
        if -1 - rank in waiting:
            self._wake(-1 - rank)
        self.messages += sent_messages * count
        self.bytes_sent += sent_bytes * count
        self.bytes_sent_max = max(self.bytes_sent_max, sent_bytes)

    def _messages(self, ops: Round, fresh: Container[int]) -> _Messages:
        """Return the sends, the receives, the bytes to add, the chunks to add them to, the reads.

        A send is (whether it has a chunk of `fresh`, peer, bytes), a receive or read (peer, bytes).
        """
        sizes, each = self.sizes, self.each
        self.operations += len(ops)
        if self.operations > OPERATIONS:
            raise _too_long(self.schedule, len(self.classes))
        if (
            len(ops) == 2
            and sizes is None
            and type(ops[0]) is Send
            and type(ops[1]) in (Recv, RecvReduce)
        ):
            (to, chunk), (source, target) = ops  # the two operations of a ring's round
            pair = ((chunk in fresh, to, each),), ((source, each),)
            return (*pair, 0.0, (), ()) if type(ops[1]) is Recv else (*pair, each, (target,), ())
        out, late, into = dict[int, float](), set[int](), dict[int, float]()
        reads = dict[int, float]()
        addition, targets = 0.0, set[int]()
        for op in ops:
            peer, chunk = op
            size = each if sizes is None else sizes[chunk]
            if type(op) is Send:
                out[peer] = out.get(peer, 0.0) + size
                if chunk in fresh:
                    late.add(peer)
            else:
                kind = type(op)
                found = reads if kind is Read or kind is ReadReduce else into
                found[peer] = found.get(peer, 0.0) + size
                if kind is RecvReduce or kind is ReadReduce:
                    addition += size
                    targets.add(chunk)
        sends = sorted(((peer in late, peer, n) for peer, n in out.items()), key=itemgetter(0))
        return sends, into.items(), addition, targets, reads.items()

    def _begin(self, rank: int, now: float) -> None:
        """Let those that read this rank's memory see that it has come to its next round."""
        self.began[rank].append(now)
        if -1 - rank in self.waiting:
            self._wake(-1 - rank)

    def _wake(self, key: int) -> None:
        self.ready.extend(player for player, _ in self.waiting.pop(key))

    def _key(self, sender: int, receiver: int) -> int:
        if self.view is not None:
            sender, receiver = self.view(sender, receiver)
        return sender * self.schedule.ranks + receiver

    def _link(self, rank: int, peer: int) -> tuple[float, float, bool]:
        """Return alpha and beta of what `rank` sends to `peer` or receives from it, and whether
        both are in one node."""
        network, node = self.network, self.node[rank]
        if node == self.node[peer]:
            return network.alpha_intra, network.beta_intra, True
        return network.alpha, network.beta * self.share.get(node, 1), False

    def share_links(self) -> None:
        """Find for each node how many of its ranks talk to other nodes."""
        crosses = {rank: self._crosses(rank) for rank, _ in self.classes}
        first = list(accumulate(self.nodes, initial=0))
        for node in {self.node[rank] for rank in crosses}:
            mates = range(first[node], first[node + 1])
            same = mates if self.view is None else [self.view(mate, mate)[0] for mate in mates]
            self.share[node] = max(1, sum(crosses[rank] for rank in same))

    def _crosses(self, rank: int) -> bool:
        node, home = self.node, self.node[rank]
        return any(node[op.peer] != home for ops in self.schedule.rounds(rank) for op in ops)

    def _note(
        self, rank: int, name: str, kind: str, start: float, stop: float, peer: int | None, n: float
    ) -> None:
        if self.room > 0:
            self.room -= 1
            self.timeline.add(Span(rank, name, kind, start, stop, peer, round(n)))


def _check_size(schedule: CommSchedule) -> None:
    """Refuse a full expansion that would be too long, judged by the shortest of three ranks."""
    p = schedule.ranks
    if p > 1000:
        sample = {p // 3, p // 2, p - 1}
        if p * min(sum(map(len, schedule.rounds(rank))) for rank in sample) > OPERATIONS:
            raise _too_long(schedule, p)


def _too_long(schedule: CommSchedule, count: int) -> ScheduleError:
    rule = f"{schedule.name} takes more than {OPERATIONS:,} operations on {count:,} simulated ranks"
    fix = "Simulate fewer ranks, or nodes for which the algorithm declares classes"
    return ScheduleError(explain("p", schedule.ranks, rule, fix))
