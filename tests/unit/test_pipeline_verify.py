"""`verify` of pipeline schedules: whatever is changed is found, or is no fault."""

from collections.abc import Iterator

import pytest

from mpipar.errors import ScheduleError
from mpipar.schedule.pipeline import (
    Action,
    PipelineSchedule,
    Row,
    live,
    lower,
    make,
    parse_action,
    parse_actions,
    pipelines,
    verify,
)
from tests.unit.pipeline_replay import dense, replay


def changed(schedule: PipelineSchedule, rank: int, row: list[Action]) -> PipelineSchedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return schedule.with_actions(tuple(rows))


def mutants(schedule: PipelineSchedule) -> Iterator[tuple[str, PipelineSchedule]]:
    """Every schedule with one action dropped, doubled, swapped with another, or on another rank."""
    for rank, actions in enumerate(schedule.actions):
        row = list(actions)
        for i, action in enumerate(row):
            yield f"dropped {action}", changed(schedule, rank, row[:i] + row[i + 1 :])
            for j in {i, len(row)}:
                double = [*row[:j], action, *row[j:]]
                yield f"doubled {action}", changed(schedule, rank, double)
            for j in range(i + 1, len(row)):
                swapped = [*row]
                swapped[i], swapped[j] = row[j], row[i]
                yield f"swapped {action} and {row[j]}", changed(schedule, rank, swapped)
            if schedule.ranks > 1:
                other = (rank + 1) % schedule.ranks
                moved = changed(schedule, rank, row[:i] + row[i + 1 :])
                there = [*moved.actions[other][:i], action, *moved.actions[other][i:]]
                yield f"moved {action}", changed(moved, other, there)


SMALL = [(name, p, m) for name in pipelines() for p, m in ((1, 2), (2, 3), (3, 2))]
LARGER = [("1f1b", 4, 6), ("zb1p", 3, 5), ("interleaved", 2, 5)]


def accepted(schedule: PipelineSchedule) -> str:
    """Return "" if `verify` accepts a schedule, and what it says if not."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "p", "m"), SMALL + LARGER)
def test_mutants_are_rejected_or_right(name: str, p: int, m: int) -> None:
    schedule = make(name, p, m)
    expected = dense(schedule.stages, m)
    harmless = 0
    for change, mutant in mutants(schedule):
        fault = accepted(mutant)
        assert bool(fault) is (replay(mutant) != expected), (change, fault)
        if fault:
            assert "[" in fault.split("\n", 1)[1], (change, fault)
        else:
            harmless += 1
            assert change.startswith("swapped"), change
    assert harmless < sum(len(row) ** 2 for row in schedule.actions) / 4


@pytest.mark.parametrize(("name", "p", "m"), [("gpipe", 2, 2), ("1f1b", 3, 3), ("zb1p", 2, 3)])
def test_mutants_of_messages(name: str, p: int, m: int) -> None:
    schedule = lower(make(name, p, m))
    expected = dense(schedule.stages, m)
    for change, mutant in mutants(schedule):
        fault = accepted(mutant)
        assert bool(fault) is (replay(mutant) != expected), (change, fault)


def fault_of(schedule: PipelineSchedule, memory: int | None = None) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, memory)
    return str(caught.value).split("\n")


def schedule_of(*rows: str, placement: tuple[int, ...] = (0, 1)) -> PipelineSchedule:
    actions: tuple[Row, ...] = tuple(map(parse_actions, rows))
    microbatches = 1 + max(action.microbatch for row in actions for action in row)
    return PipelineSchedule("mine", microbatches, placement, actions)


def test_a_missing_action() -> None:
    assert fault_of(schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1")) == [
        "schedule='mine': 1B1 is missing on rank 1. Add it to rank 1",
        "rank 0 | 0F0   0F1   0B0   0B1",
        "rank 1 | 1F0   1B0  [1F1]",
    ]
    rest = fault_of(schedule_of("0F0 0B0 0W0", "1F0 1B0"))
    assert rest[0] == "schedule='mine': 1W0 is missing on rank 1. Add it to rank 1"


def test_a_doubled_action() -> None:
    assert fault_of(schedule_of("0F0 0F1 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")) == [
        "schedule='mine': 0F1 is doubled on rank 0, in places 1 and 3. Keep one of them",
        "rank 0 | 0F0  [0F1]  0B0  [0F1]  0B1",
        "rank 1 | 1F0   1B0   1F1   1B1",
    ]


def test_an_order_that_deadlocks() -> None:
    lines = fault_of(schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert lines == [
        "schedule='mine': deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 has behind 1F1; "
        "rank 1 waits at 1F1 for 0F1, which rank 0 has behind 0B0. "
        "Put every action behind what it needs",
        "rank 0 | 0F0  [0B0]  0F1   0B1",
        "rank 1 | 1F0  [1F1]  1B0   1B1",
    ]
    assert (
        "rank 1 waits at 1B0 for 1F0, which rank 1 itself has behind 1B0"
        in (fault_of(schedule_of("0F0 0B0", "1B0 1F0"))[0])
    )


def test_an_action_on_the_wrong_rank() -> None:
    lines = fault_of(schedule_of("0F0 1F0 0B0", "1B0"))
    assert "1F0 is on rank 0, but rank 1 holds stage 1. Move it to rank 1" in lines[0]
    assert lines[1] == "rank 0 | 0F0  [1F0]  0B0"


@pytest.mark.parametrize("action", [Action(2, "F", 0), Action(0, "F", 1), Action(-1, "F", 0)])
def test_an_action_of_no_stage(action: Action) -> None:
    row = [*parse_actions("0F0 0B0"), action]
    lines = fault_of(changed(schedule_of("0F0 0B0", "1F0 1B0"), 0, row))
    assert "is not of the 2 stages and 1 micro-batches" in lines[0]
    assert f"[{action}]" in lines[1]


def test_a_kind_that_is_none() -> None:
    row = [*parse_actions("0F0 0B0"), Action(0, "X", 0)]
    lines = fault_of(changed(schedule_of("0F0 0B0", "1F0 1B0"), 0, row))
    assert "0X0 on rank 0 is of no kind that there is" in lines[0]


def test_a_message_without_another_end() -> None:
    row = [*parse_actions("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0")]
    schedule = lower(schedule_of("0F0 0B0", "1F0 1B0"))
    assert "0SEND_B0 on rank 0 has no other end" in fault_of(changed(schedule, 0, row))[0]
    dropped = [action for action in row if action.kind != "RECV_B"][:-1]
    assert "0RECV_B0 is missing on rank 0" in fault_of(changed(schedule, 0, dropped))[0]


def test_both_neighbours_send_first() -> None:
    """Receives posted only where they are needed: ends with eager sends, not with synchronous."""
    schedule = make("1f1b", 2, 4)
    rows = []
    for row in lower(schedule).actions:
        late: list[Action] = []
        for action in row:
            if action.kind.startswith("RECV"):
                continue
            receive = parse_action(f"{action.stage}RECV_{action.kind[-1]}{action.microbatch}")
            late += [receive, action] if action.computes and receive in row else [action]
        rows.append(tuple(late))
    lines = fault_of(schedule.with_actions(tuple(rows)))
    assert lines[0] == (
        "schedule='1f1b': deadlock with synchronous sends: rank 0 waits at 0SEND_F1 for 1RECV_F1, "
        "which rank 1 has behind 1SEND_B0; rank 1 waits at 1SEND_B0 for 0RECV_B0, which rank 0 "
        "has behind 0SEND_F1. Put every action behind what it needs"
    )
    assert "[0SEND_F1]" in lines[1]
    assert "[1SEND_B0]" in lines[2]


def test_messages_in_another_order() -> None:
    schedule = lower(make("gpipe", 2, 2))
    row = parse_actions("1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1")
    lines = fault_of(changed(schedule, 1, list(row)))
    assert "rank 0 sends 0SEND_F0 where rank 1 expects 1RECV_F1" in lines[0]
    assert "[0SEND_F0]" in lines[1]
    assert "[1RECV_F1]" in lines[2]


def test_memory() -> None:
    verify(make("1f1b", 4, 8), memory=4)
    lines = fault_of(make("gpipe", 4, 8), memory=4)
    assert "rank 0 holds 5 activations at 0F4, and 4 fit" in lines[0]
    assert "[0F4]" in lines[1]
    assert live(make("1f1b", 2, 3), 0) == [1, 2, 2, 2, 2, 1]
    assert live(make("zb1p", 2, 2), 1) == [1, 1, 2, 2, 2, 1]


def test_far_cells_are_cut() -> None:
    schedule = make("1f1b", 20, 40)
    row = list(schedule.actions[15])
    row[40] = row[30]
    lines = fault_of(changed(schedule, 15, row))
    assert len(lines) == 1 + 12 + 1
    assert lines[-1].startswith("rank 15 |... ")
    assert "[15F17]" in lines[-1]
    assert lines[-1].endswith(" ...")
    assert max(map(len, lines[1:])) <= 96
