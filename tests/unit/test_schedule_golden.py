"""Every algorithm on 4 ranks, as text: what rank sends which chunk to whom, round by round.

`3>1` sends chunk 3 to rank 1, `3<1` receives it from there, `3+1` receives it and adds it; `3@1`
reads it there, in memory that both share, and `3&1` reads it and adds it.  Rooted collectives have
root 1 here, and nodes are of 2 ranks.
"""

import pytest

from mpipar.errors import ScheduleError
from mpipar.schedule import describe, generators, make, parse_rounds

GOLDEN = {
    "all_reduce/direct": """
0: 1>1 2>2 3>3 0+1 0+2 0+3 | 0>1 0>2 0>3 1<1 2<2 3<3
1: 2>2 3>3 0>0 1+2 1+3 1+0 | 1>2 1>3 1>0 2<2 3<3 0<0
2: 3>3 0>0 1>1 2+3 2+0 2+1 | 2>3 2>0 2>1 3<3 0<0 1<1
3: 0>0 1>1 2>2 3+0 3+1 3+2 | 3>0 3>1 3>2 0<0 1<1 2<2
""",
    "all_reduce/halving_doubling": """
0: 2>1 3>1 0+1 1+1 | 1>2 0+2 | 0>2 1<2 | 0>1 1>1 2<1 3<1
1: 0>0 1>0 2+0 3+0 | 3>3 2+3 | 2>3 3<3 | 2>0 3>0 0<0 1<0
2: 2>3 3>3 0+3 1+3 | 0>0 1+0 | 1>0 0<0 | 0>3 1>3 2<3 3<3
3: 0>2 1>2 2+2 3+2 | 2>1 3+1 | 3>1 2<1 | 2>2 3>2 0<2 1<2
""",
    "all_reduce/hierarchical": """
0: 2>1 3>1 0+1 1+1 | 1>2 0+2 | 0>2 1<2 | 0>1 1>1 2<1 3<1
1: 0>0 1>0 2+0 3+0 | 3>3 2+3 | 2>3 3<3 | 2>0 3>0 0<0 1<0
2: 2>3 3>3 0+3 1+3 | 0>0 1+0 | 1>0 0<0 | 0>3 1>3 2<3 3<3
3: 0>2 1>2 2+2 3+2 | 2>1 3+1 | 3>1 2<1 | 2>2 3>2 0<2 1<2
""",
    "all_reduce/recursive_doubling": """
0: 0>1 0+1 | 0>2 0+2
1: 0>0 0+0 | 0>3 0+3
2: 0>3 0+3 | 0>0 0+0
3: 0>2 0+2 | 0>1 0+1
""",
    "all_reduce/ring": """
0: 3>1 2+3 | 2>1 1+3 | 1>1 0+3 | 0>1 3<3 | 3>1 2<3 | 2>1 1<3
1: 0>2 3+0 | 3>2 2+0 | 2>2 1+0 | 1>2 0<0 | 0>2 3<0 | 3>2 2<0
2: 1>3 0+1 | 0>3 3+1 | 3>3 2+1 | 2>3 1<1 | 1>3 0<1 | 0>3 3<1
3: 2>0 1+2 | 1>0 0+2 | 0>0 3+2 | 3>0 2<2 | 2>0 1<2 | 1>0 0<2
""",
    "all_reduce/tree": """
0: 0+1 | 0+2 | 0>2 | 0>1
1: 0>0 | 0<0
2: 0+3 | 0>0 | 0<0 | 0>3
3: 0>2 | 0<2
""",
    "all_reduce/window": """
0: 0&1 1&1 | 1>2 0+2 | 0>2 1<2 | 2@1 3@1
1: 2&0 3&0 | 3>3 2+3 | 2>3 3<3 | 0@0 1@0
2: 0&3 1&3 | 0>0 1+0 | 1>0 0<0 | 2@3 3@3
3: 2&2 3&2 | 2>1 3+1 | 3>1 2<1 | 0@2 1@2
""",
    "reduce_scatter/direct": """
0: 1>1 2>2 3>3 0+1 0+2 0+3
1: 2>2 3>3 0>0 1+2 1+3 1+0
2: 3>3 0>0 1>1 2+3 2+0 2+1
3: 0>0 1>1 2>2 3+0 3+1 3+2
""",
    "reduce_scatter/pairwise": """
0: 1>1 0+3 | 2>2 0+2 | 3>3 0+1
1: 2>2 1+0 | 3>3 1+3 | 0>0 1+2
2: 3>3 2+1 | 0>0 2+0 | 1>1 2+3
3: 0>0 3+2 | 1>1 3+1 | 2>2 3+0
""",
    "reduce_scatter/recursive_halving": """
0: 1>1 3>1 0+1 2+1 | 2>2 0+2
1: 0>0 2>0 1+0 3+0 | 3>3 1+3
2: 1>3 3>3 0+3 2+3 | 0>0 2+0
3: 0>2 2>2 1+2 3+2 | 1>1 3+1
""",
    "reduce_scatter/ring": """
0: 3>1 2+3 | 2>1 1+3 | 1>1 0+3
1: 0>2 3+0 | 3>2 2+0 | 2>2 1+0
2: 1>3 0+1 | 0>3 3+1 | 3>3 2+1
3: 2>0 1+2 | 1>0 0+2 | 0>0 3+2
""",
    "all_gather/bruck": """
0: 0>3 1<1 | 0>2 1>2 2<2 3<2
1: 1>0 2<2 | 1>3 2>3 3<3 0<3
2: 2>1 3<3 | 2>0 3>0 0<0 1<0
3: 3>2 0<0 | 3>1 0>1 1<1 2<1
""",
    "all_gather/direct": """
0: 0>1 0>2 0>3 1<1 2<2 3<3
1: 1>2 1>3 1>0 2<2 3<3 0<0
2: 2>3 2>0 2>1 3<3 0<0 1<1
3: 3>0 3>1 3>2 0<0 1<1 2<2
""",
    "all_gather/recursive_doubling": """
0: 0>1 1<1 | 0>2 1>2 2<2 3<2
1: 1>0 0<0 | 0>3 1>3 2<3 3<3
2: 2>3 3<3 | 2>0 3>0 0<0 1<0
3: 3>2 2<2 | 2>1 3>1 0<1 1<1
""",
    "all_gather/ring": """
0: 0>1 3<3 | 3>1 2<3 | 2>1 1<3
1: 1>2 0<0 | 0>2 3<0 | 3>2 2<0
2: 2>3 1<1 | 1>3 0<1 | 0>3 3<1
3: 3>0 2<2 | 2>0 1<2 | 1>0 0<2
""",
    "all_to_all/bruck": """
0: 1>1 3>1 12<3 14<3 | 2>2 14>2 8<2 4<2
1: 6>2 4>2 1<0 3<0 | 7>3 3>3 13<3 9<3
2: 11>3 9>3 6<1 4<1 | 8>0 4>0 2<0 14<0
3: 12>0 14>0 11<2 9<2 | 13>1 9>1 7<1 3<1
""",
    "all_to_all/direct": """
0: 1>1 2>2 3>3 4<1 8<2 12<3
1: 6>2 7>3 4>0 9<2 13<3 1<0
2: 11>3 8>0 9>1 14<3 2<0 6<1
3: 12>0 13>1 14>2 3<0 7<1 11<2
""",
    "all_to_all/pairwise": """
0: 1>1 12<3 | 2>2 8<2 | 3>3 4<1
1: 6>2 1<0 | 7>3 13<3 | 4>0 9<2
2: 11>3 6<1 | 8>0 2<0 | 9>1 14<3
3: 12>0 11<2 | 13>1 7<1 | 14>2 3<0
""",
    "broadcast/tree": """
0: 0<1
1: 0>2 | 0>0
2: 0<1 | 0>3
3: 0<2
""",
    "broadcast/scatter_all_gather": """
0: 0<1 | 3<3 | 2<3 | 1<3
1: 2>2 3>2 | 0>0 | 1>2 | 0>2
2: 2<1 3<1 | 3>3 | 2>3 1<1 | 1>3 0<1 | 0>3
3: 3<2 | 3>0 2<2 | 2>0 1<2 | 1>0 0<2
""",
    "reduce/linear": """
0: 0>1
1: 0+0 0+2 0+3
2: 0>1
3: 0>1
""",
    "reduce/tree": """
0: 0>1
1: 0+0 | 0+2
2: 0+3 | 0>1
3: 0>2
""",
    "gather/linear": """
0: 0>1
1: 0<0 2<2 3<3
2: 2>1
3: 3>1
""",
    "gather/tree": """
0: 0>1
1: 0<0 | 2<2 3<2
2: 3<3 | 2>1 3>1
3: 3>2
""",
    "scatter/linear": """
0: 0<1
1: 0>0 2>2 3>3
2: 2<1
3: 3<1
""",
    "scatter/tree": """
0: 0<1
1: 2>2 3>2 | 0>0
2: 2<1 3<1 | 3>3
3: 3<2
""",
    "barrier/dissemination": """
0: 0>1 3<3 | 0>2 3>2 2<2 1<2
1: 1>2 0<0 | 1>3 0>3 3<3 2<3
2: 2>3 1<1 | 2>0 1>0 0<0 3<0
3: 3>0 2<2 | 3>1 2>1 1<1 0<1
""",
    "shift/ring": """
0: 0>1 3<3
1: 1>2 0<0
2: 2>3 1<1
3: 3>0 2<2
""",
}

NAMES = [f"{c}/{a}" for c, of in generators.items() for a in of]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_on_4_ranks(name):
    schedule = make(*name.split("/"), 4, root=1, nodes=(2, 2))
    assert describe(schedule) == GOLDEN[name].strip()


def test_hierarchical_with_nodes_of_3_and_1_ranks():
    schedule = make("all_reduce", "hierarchical", 4, nodes=(3, 1))
    assert describe(schedule) == (
        "0: 2>1 3>1 4>2 5>2 0+1 1+1 0+2 1+2 | 1>3 0+3 | 0>3 1<3 | 0>1 1>1 0>2 1>2 2<1 3<1 4<2 5<2\n"
        "1: 4>2 5>2 0>0 1>0 2+2 3+2 2+0 3+0 | 3>3 2+3 | 2>3 3<3 | 2>2 3>2 2>0 3>0 4<2 5<2 0<0 1<0\n"
        "2: 0>0 1>0 2>1 3>1 4+0 5+0 4+1 5+1 | 5>3 4+3 | 4>3 5<3 | 4>0 5>0 4>1 5>1 0<0 1<0 2<1 3<1\n"
        "3: - | 0>0 1+0 2>1 3+1 4>2 5+2 | 1>0 0<0 3>1 2<1 5>2 4<2 | -"
    )


def test_folding_on_3_ranks():
    assert describe(make("all_reduce", "recursive_doubling", 3)) == (
        "0: 0+1 | 0>2 0+2 | 0>1\n1: 0>0 | 0<0\n2: 0>0 0+0"
    )


@pytest.mark.parametrize("name", NAMES)
def test_text_reads_back(name):
    schedule = make(*name.split("/"), 5)
    for rank, line in enumerate(describe(schedule).split("\n")):
        assert parse_rounds(line.split(":")[1]) == list(schedule.rounds(rank))


def test_an_empty_round_is_a_dash():
    assert parse_rounds("- | 0>1") == [(), *parse_rounds("0>1")]
    assert parse_rounds("") == []


def test_text_that_is_no_operation():
    with pytest.raises(ScheduleError, match=r"'0=1'.*chunk>peer"):
        parse_rounds("0>1 0=1")
