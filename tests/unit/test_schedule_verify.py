from collections import Counter

import pytest

from mpipar.errors import ScheduleError
from mpipar.schedule import (
    CommSchedule,
    Recv,
    RecvReduce,
    Send,
    generators,
    make,
    parse_rounds,
    segment,
    verify,
)

NAMES = [f"{c}/{a}" for c, of in generators.items() for a in of]
ROOTED = [
    name for name in NAMES if "root" in generators[name.split("/")[0]][name.split("/")[1]].options
]


def ordered(name):
    collective, algorithm = name.split("/")
    return generators[collective][algorithm].ordered


def written(collective, *ranks, chunks=1, **fields):
    """Make a schedule from one line of text for each rank."""
    programs = [parse_rounds(text) for text in ranks]
    return CommSchedule(
        collective, "written", len(ranks), chunks, lambda r: iter(programs[r]), **fields
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [*range(1, 17), 17, 23, 32, 61])
def test_every_algorithm_is_right(name, p):
    schedule = make(*name.split("/"), p, root=p // 3, offset=-2)
    verify(schedule, ordered=ordered(name))


@pytest.mark.parametrize("name", ROOTED)
def test_every_root(name):
    for p in range(1, 12):
        for root in range(p):
            verify(make(*name.split("/"), p, root=root), ordered=ordered(name))


@pytest.mark.parametrize("offset", [0, 1, -1, 3, 5, -5, 7, 12])
def test_every_shift(offset):
    schedule = make("shift", "ring", 5, offset=offset)
    verify(schedule)
    assert bool(list(schedule.rounds(2))) == bool(offset % 5)


@pytest.mark.parametrize(
    "nodes",
    [(1,), (7,), (1, 1, 1), (3, 1), (1, 3), (2, 3, 2), (5, 1, 4, 2), (4, 4, 4, 4), (1, 6, 1)],
)
def test_every_layout_of_nodes(nodes):
    schedule = make("all_reduce", "hierarchical", sum(nodes), nodes=nodes)
    verify(schedule, ordered=True)
    verify(segment(schedule, 3), ordered=True)


def test_what_keeps_rank_order():
    """Ring and pairwise add in another order; everything else that adds keeps rank order."""
    reducing = [name for name in NAMES if make(*name.split("/"), 2).reduced]
    assert [name for name in reducing if not ordered(name)] == [
        "all_reduce/ring",
        "reduce_scatter/pairwise",
        "reduce_scatter/ring",
    ]
    for name in reducing:
        if not ordered(name):
            with pytest.raises(ScheduleError, match="not rank order"):
                verify(make(*name.split("/"), 4), ordered=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_posted_request_has_its_other_end(name):
    schedule = make(*name.split("/"), 7)
    sends, receives = Counter(), Counter()
    for rank in range(7):
        for ops in schedule.rounds(rank):
            for op in ops:
                if type(op) is Send:
                    sends[rank, op.peer, op.chunk] += 1
                elif type(op) in (Recv, RecvReduce):
                    receives[op.peer, rank, op.chunk] += 1
    assert sends == receives
    assert sends


def test_both_neighbours_send_first():
    schedule = written("shift", "0>1 | 2<2", "1>2 | 0<0", "2>0 | 1<1", chunks=3)
    with pytest.raises(ScheduleError, match="deadlock with synchronous sends") as caught:
        verify(schedule)
    text = str(caught.value)
    assert "eager sends would end" in text
    for rank, peer in ((0, 1), (1, 2), (2, 0)):
        assert f"rank {rank} in round 0 waits to send chunks [{rank}] to rank {peer}" in text


def test_both_neighbours_receive_first():
    schedule = written("shift", "1<1 | 0>1", "0<0 | 1>0", chunks=2)
    with pytest.raises(ScheduleError, match=r"with eager ones too.*rank 0 in round 0 waits for"):
        verify(schedule)


WRONG_ALL_REDUCES = [  # on 2 ranks and 2 chunks, and what the error says
    (("0>1 0+1", "0>0"), r"waits to send chunks \[0\] to rank 1; but rank 1 has ended"),
    (("0>1 0+1", "0+0"), r"rank 0 in round 0 waits for chunks \[0\] from rank 1; but rank 1 has"),
    (("0>1 0+1 | 0>1", "0>0 0+0"), r"round 1 waits to send chunks \[0\] to rank 1; but rank 1"),
    (
        ("0>1 0+1 | 0>1 0+1", "0>0 0+0 | 0>0 0+0"),
        r"round 1: chunk 0 .* \[0, 1\] twice, from rank 0 and from",
    ),
    (("0>1 0<1", "0>0 0+0"), r"rank 0 ends with .* \[1\] in chunk 0, .* rank 0 in round 0 repl"),
    (("0>1 1+1", "1>0 0+0"), r"rank 0 ends with the contributions of ranks \[0\] in chunk 0"),
    (("0>1 0+1", "1>0 0+0"), r"sends chunks \[1\] to rank 0, where .* expects chunks \[0\]"),
    (("0>2", "0+0"), "names a peer or a chunk"),
    (("0>0", "0+0"), "names a peer or a chunk"),
    (("7>1", "7+0"), "names a peer or a chunk"),
]


@pytest.mark.parametrize(("ranks", "text"), WRONG_ALL_REDUCES)
def test_wrong_all_reduces(ranks, text):
    with pytest.raises(ScheduleError, match=text):
        verify(written("all_reduce", *ranks, chunks=2))


def test_a_value_that_is_not_there_yet():
    with pytest.raises(
        ScheduleError, match="rank 1 in round 0 sends chunk 0 to rank 2, but has no"
    ):
        verify(written("broadcast", "0>1", "0>2 | 0<0", "0<1"))
    with pytest.raises(ScheduleError, match="rank 1 in round 0 adds chunk 0 from rank 0"):
        verify(written("broadcast", "0>1", "0+0"))


def test_a_message_that_nobody_uses():
    gather = written("gather", "1<1", "1>0 0<2", "0>1", chunks=3)
    with pytest.raises(ScheduleError, match="rank 2 in round 0 sends chunk 0"):
        verify(gather)
    with pytest.raises(
        ScheduleError, match="chunk 2, which rank 1 received from rank 2 in round 0"
    ):
        verify(written("gather", "1<1 2<2", "1>0 2<2", "2>0 2>1", chunks=3))


def test_a_value_that_is_replaced_before_it_is_used():
    with pytest.raises(
        ScheduleError, match=r"chunk 0, which rank 0 had from the start, .* round 0"
    ):
        verify(written("reduce", "0<1", "0>0"))


def test_a_chunk_that_is_replaced_twice_in_a_round():
    with pytest.raises(ScheduleError, match="replaces chunk 0 twice, the second time from rank 2"):
        verify(written("reduce", "0<1 0<2", "0>0", "0>0"))


def test_messages_of_one_pair_match_in_order_whatever_the_round_numbers():
    verify(written("all_reduce", "- | 0>1 1>1 | 0<1 | 1<1", "0+0 1+0 | - | 0>0 | 1>0", chunks=2))


def test_chunks_of_one_message_in_another_order():
    with pytest.raises(ScheduleError, match=r"chunks \[0, 1\] to rank 1.*expects chunks \[1, 0\]"):
        verify(written("broadcast", "0>1 1>1", "1<0 0<0", chunks=2))


def test_a_sum_that_is_not_in_rank_order():
    schedule = written("reduce", "0+2 | 0+1", "0>0", "0>0")
    verify(schedule)
    with pytest.raises(
        ScheduleError, match=r"rank 0 in round 0.* \[0\] .* \[2\], which is not rank"
    ):
        verify(schedule, ordered=True)


def test_a_recv_and_a_recvreduce_of_one_chunk_in_a_round_drop_the_own_value():
    """Rank 0 hands its value to rank 1, and what the others send back replaces it."""
    verify(written("reduce", "0>1 | 0<1 0+2", "0+0 | 0>0", "- | 0>0"), ordered=True)
