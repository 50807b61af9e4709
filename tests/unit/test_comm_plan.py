"""Compiled plans of all ranks, carried out in one process, give what the collective means.

The carrier below follows run.py's order (early posts, additions, late posts) without MPI, for any
number of ranks.  A message's bytes are read either when it is sent or when it is received, which
may be steps later on the sender's side; memory that is written too early or too late shows up.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from mpipar import schedule
from mpipar.comm import buffers, choice, node
from mpipar.comm.plan import SPACES, Fold, Message, Plan, Step, compile_plan
from mpipar.comm.prepare import layout_of
from mpipar.partition import blocks
from mpipar.schedule import CommSchedule

CASES = [
    (collective, algorithm)
    for collective in schedule.generators
    for algorithm in schedule.algorithms(collective)
]


class Rank:
    """One rank's memory and progress."""

    def __init__(self, number: int, plan: Plan, source: np.ndarray) -> None:
        self.number, self.plan, self.step = number, plan, 0
        self.spaces = [np.full(plan.sizes[space], np.nan) for space in range(SPACES)]
        self.spaces[0][:] = source
        self.receives: list[Message] = []
        self.unread: list[list] = []  # queue entries whose bytes are read as late as may be

    def unread_up_to(self, step: int) -> bool:
        return any(entry[3] <= step for entry in self.unread)

    def at(self, place: tuple[int, int, int]) -> np.ndarray:
        space, start, stop = place
        return self.spaces[space][start:stop]

    def fold(self, folds: Sequence[Fold]) -> None:
        for out, operands in folds:
            total = self.at(operands[0]).copy()
            for operand in operands[1:]:
                total = total + self.at(operand)
            self.at(out)[:] = total


def carry(plans: list[Plan], sources: list[np.ndarray], late: bool) -> list[np.ndarray]:
    """Run all ranks to the end; raises if they are stuck."""
    ranks = [Rank(i, plan, s) for i, (plan, s) in enumerate(zip(plans, sources, strict=True))]
    queues: dict[tuple[int, int], deque] = {}

    def post(rank: Rank, number: int, receives: list[Message], sends: list[Message]) -> None:
        rank.receives += receives
        for peer, place in sends:
            entry = [None if late else rank.at(place).copy(), rank, place, number]
            queues.setdefault((rank.number, peer), deque()).append(entry)
            if late:
                rank.unread.append(entry)

    def post_late(rank: Rank, number: int, step: Step) -> None:
        rank.fold(step.packs)
        post(rank, number, step.late_receives, step.late_sends)

    for rank in ranks:
        if rank.plan.steps:
            first = rank.plan.steps[0]
            post(rank, 0, first.early_receives, first.early_sends)
            post_late(rank, 0, first)
        rank.fold(rank.plan.copies)
    idle, sweep = 0, 0
    while idle < 5:  # one rank takes part in every fourth sweep only, so the others run ahead
        idle, sweep = idle + 1, sweep + 1
        for rank in ranks:
            slow = rank.number == len(ranks) // 2 and sweep % 4
            if slow or rank.step >= len(rank.plan.steps):
                continue
            for message in list(rank.receives):
                queue = queues.get((message.peer, rank.number))
                if queue:
                    entry = queue.popleft()
                    data = entry[0] if entry[0] is not None else entry[1].at(entry[2])
                    rank.at(message.place)[:] = data
                    if late:
                        entry[1].unread.remove(entry)
                    rank.receives.remove(message)
                    idle = 0
            done = rank.plan.steps[rank.step]
            following = rank.plan.steps[rank.step + 1 : rank.step + 2]
            needed = following[0].post_after if following else rank.step
            if rank.receives or rank.unread_up_to(max(needed, done.fold_after)):
                continue
            idle = 0
            for step in following:
                post(rank, rank.step + 1, step.early_receives, step.early_sends)
            rank.fold(done.folds)
            for step in following:
                post_late(rank, rank.step + 1, step)
            rank.step += 1
    assert all(rank.step == len(rank.plan.steps) for rank in ranks), "stuck"
    assert not any(queues.values()), "messages left over"
    return [rank.spaces[1] for rank in ranks]


def make(collective: str, algorithm: str, p: int, parts: int) -> CommSchedule:
    nodes = blocks(p, min(p, 3)) if algorithm == "hierarchical" else None
    root = p // 2 if collective in ("broadcast", "reduce", "gather", "scatter") else 0
    made = schedule.make(collective, algorithm, p, root=root, nodes=nodes)
    return schedule.segment(made, parts) if parts > 1 else made


def sizes_of(made: CommSchedule, n: int) -> tuple[int, ...]:
    p = made.ranks
    match made.collective:
        case "all_reduce" | "broadcast" | "reduce":
            return blocks(n, made.blocks)
        case "all_to_all":
            return tuple(a * b for a in blocks(n, p) for b in blocks(n + 1, p))
        case "shift":
            return (n,) * p
        case "barrier":
            return (0,) * p
    return blocks(n, p)


@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_plans_give_the_collective(collective: str, algorithm: str, late: bool) -> None:
    for p in (1, 2, 3, 4, 5, 8, 13):
        for parts in (1, 3):
            made = make(collective, algorithm, p, parts)
            for n in (13, 2 * p + 1, 1):
                check(made, n, late)


def check(made: CommSchedule, n: int, late: bool) -> None:
    p, sizes = made.ranks, sizes_of(made, n)
    layouts = [layout_of(made, r, sizes) for r in range(p)]
    plans = [compile_plan(made, r, layouts[r]) for r in range(p)]
    rng = np.random.default_rng(n)
    held = [sorted({c // made.parts for c in made.initial(r)}) for r in range(p)]
    value = {
        (r, b): rng.integers(-99, 99, sizes[b]).astype(float) for r in range(p) for b in held[r]
    }
    sources = [np.concatenate([value[r, b] for b in held[r]] or [np.empty(0)]) for r in range(p)]
    results = carry(plans, sources, late)
    for r in range(p):
        expected = []
        for b in sorted({c // made.parts for c in made.final(r)}):
            holders = [value[q, b] for q in range(p) if (q, b) in value]
            expected.append(np.sum(holders, axis=0) if made.reduced else holders[0])
        whole = np.concatenate(expected or [np.empty(0)])
        np.testing.assert_array_equal(
            results[r], whole, err_msg=f"{made.name} p={p} rank {r} n={n}"
        )


def test_a_ring_copies_nothing_it_need_not() -> None:
    """The first addition reads the input and writes the output; no chunk is copied."""
    made = schedule.make("all_reduce", "ring", 4)
    plan = compile_plan(made, 1, layout_of(made, 1, blocks(16, 4)))
    assert not plan.copies
    assert not any(step.packs for step in plan.steps)
    assert all(len(fold.operands) == 2 for step in plan.steps for fold in step.folds)
    assert plan.sizes[2:] == [0, 4, 4]  # nothing kept aside, two halves of scratch


def test_segments_are_sent_before_the_previous_one_is_added() -> None:
    made = schedule.segment(schedule.make("all_reduce", "ring", 4), 4)
    plan = compile_plan(made, 0, layout_of(made, 0, blocks(64, 4)))
    assert not any(step.late_sends for step in plan.steps)
    assert not any(step.late_receives for step in plan.steps)


def test_the_large_count_limit_cuts_alike_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LIMIT", 10)
    lengths = [triple[1] for triple in buffers.pieces(np.zeros(25, np.uint8))]
    assert lengths == [10, 10, 5]
    assert [t[1] for t in buffers.pieces(np.zeros(0, np.uint8))] == [0]


def test_nodes_are_found_for_everylayout_of() -> None:
    pairs = node.arrange([7, 7, 9, 9], rank=3)
    assert (pairs.sizes, pairs.local_rank, pairs.local_size, pairs.count) == ((2, 2), 1, 2, 2)
    mixed = node.arrange([7, 9, 7, 9], rank=2)
    assert (mixed.sizes, mixed.local_rank, mixed.local_size) == (None, 1, 2)
    sixteen = node.arrange([5] * 16, rank=15)
    assert (sixteen.sizes, sixteen.local_rank, sixteen.local_size) == ((16,), 15, 16)


def test_choice_depends_on_agreed_values_only() -> None:
    one_node, four = node.arrange([1] * 4, 0), node.arrange([1, 1, 2, 2], 0)
    table = choice.Table({})
    for collective in schedule.generators:
        for nbytes in (0, 4, 1 << 14, 1 << 20, 1 << 30):
            for nodes in (one_node, four):
                name = choice.choose(collective, nbytes, 4, nodes, table)
                assert name in schedule.algorithms(collective)
    measured = choice.Table({("all_reduce", 4): ((100.0, "tree"), (float("inf"), "direct"))})
    assert choice.choose("all_reduce", 50, 4, one_node, measured) == "tree"
    assert choice.choose("all_reduce", 500, 4, one_node, measured) == "direct"


def test_tuning_table_round_trip(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "deep" / "tuning.json"
    assert choice.read_table(path).rows == {}
    table = choice.Table({("all_reduce", 4): ((100.0, "tree"), (float("inf"), "direct"))})
    choice.write_table(path, table)
    assert choice.read_table(path) == table
    path.write_text("{}")
    with pytest.raises(ValueError, match="tuning"):
        choice.read_table(path)


def test_a_crowded_node_keeps_chunks_whole() -> None:
    assert choice.segments(1 << 25, None, crowded=False) == 8
    assert choice.segments(1 << 25, None, crowded=True) == 1
    assert choice.segments(1 << 25, 1 << 20, crowded=True) == 32
