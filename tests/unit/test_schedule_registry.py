import pickle
from itertools import islice

import pytest

from mpipar.errors import ConfigError, ScheduleError
from mpipar.schedule import COLLECTIVES, algorithms, generators, make
from mpipar.schedule.registry import default_nodes

ASKED_FOR = {
    "all_reduce": "ring recursive_doubling halving_doubling tree hierarchical direct",
    "reduce_scatter": "ring recursive_halving pairwise direct",
    "all_gather": "ring bruck recursive_doubling direct",
    "all_to_all": "pairwise bruck direct",
    "broadcast": "tree scatter_all_gather",
    "reduce": "tree linear",
    "gather": "tree linear",
    "scatter": "tree linear",
    "barrier": "dissemination",
    "shift": "ring",
}


def test_all_collectives_and_algorithms_are_there():
    assert tuple(generators) == COLLECTIVES
    for collective, names in ASKED_FOR.items():
        assert sorted(algorithms(collective)) == sorted(names.split())


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_name_is_honoured(collective):
    for algorithm in algorithms(collective):
        schedule = make(collective, algorithm, 6, root=0, offset=2)
        assert schedule.name == f"{collective}/{algorithm}"
        assert schedule.ranks == 6
        assert generators[collective][algorithm].about


def test_unknown_names_list_the_choices():
    with pytest.raises(ConfigError, match=r"collective='all_redcue'.*all_reduce, reduce_scatter"):
        make("all_redcue", "ring", 4)
    with pytest.raises(ConfigError, match=r"algorithm='rang'.*direct.*ring.*Choose one of them"):
        make("all_reduce", "rang", 4)
    with pytest.raises(ConfigError, match="collective='all'"):
        algorithms("all")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"p": 0}, "p=0"),
        ({"p": 4, "root": 4}, r"root=4: ranks are 0\.\.3"),
        ({"p": 4, "root": -1}, "root=-1"),
    ],
)
def test_values_that_cannot_work(options, text):
    with pytest.raises(ConfigError, match=text):
        make("broadcast", "tree", **options)


@pytest.mark.parametrize("nodes", [(), (2, 1), (4, 0), (5, -1)])
def test_nodes_that_do_not_add_up(nodes):
    with pytest.raises(ConfigError, match=r"nodes=.*p=4"):
        make("all_reduce", "hierarchical", 4, nodes=nodes)


def test_a_rank_outside_the_group():
    with pytest.raises(ScheduleError, match=r"rank=4: ranks are 0\.\.3"):
        make("all_reduce", "ring", 4).rounds(4)


def test_default_nodes_are_about_as_many_as_large():
    assert [default_nodes(p) for p in (1, 4, 5, 8)] == [(1,), (2, 2), (3, 2), (4, 4)]


def test_schedules_can_be_pickled():
    schedule = pickle.loads(pickle.dumps(make("all_reduce", "hierarchical", 5, nodes=(3, 2))))
    assert len(list(schedule.rounds(4))) == 4


@pytest.mark.parametrize(
    "name",
    [
        f"{collective}/{algorithm}"
        for collective, of in generators.items()
        for algorithm in of
        if algorithm not in ("direct", "linear")
        and (collective, algorithm) != ("all_to_all", "bruck")
    ],
)
def test_rounds_are_made_lazily(name):
    """The first round of one rank of very many is there at once: nothing is built for the others.

    (Where a single round has an operation for each rank, there is nothing to be lazy about.)
    """
    p = 1 << 14
    schedule = make(*name.split("/"), p, nodes=(8,) * (p // 8))
    assert len(list(islice(schedule.rounds(p - 2), 1))) == 1
